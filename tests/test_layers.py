"""The direction of imports between the rooms of docs/architecture.md: nothing runs back."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Each room, a folder or a module of `itemset`, and the rooms that it may import: only such as stand above it.
ALLOWED = {
    "errors": "",
    "client": "",
    "text": "errors",
    "storage": "errors",
    "trie": "errors text storage",
    "item_set": "errors text trie",
    "opening": "errors trie item_set",
    "select": "errors trie item_set opening",
    "published": "errors storage trie item_set opening",
    "building": "errors text storage trie item_set",
    "publishing": "errors storage item_set published building",
    "masking": "errors trie item_set",
    "ranking": "errors text trie item_set masking select",
    "embedded": "errors trie item_set opening select masking",
    "serving": "errors text storage trie item_set opening select published masking ranking embedded",
    "training": "errors trie item_set ranking",
    "draft_head": "errors text trie item_set masking ranking",
    "devices": "masking ranking",
    "adapters": "errors trie item_set masking ranking draft_head training",
    "__init__": "errors trie item_set opening select building",
    "cli": "errors text storage trie item_set published building publishing draft_head __init__",
    "__main__": "cli",
    "source_sets": "errors text storage trie published building serving cli",
}
BESIDE_EACH_OTHER = {"building", "masking"}
ENGINES = {"vllm", "sglang", "vllm_static", "sglang_static"}
OF_ENGINES = {"vllm_static": {"sglang", "sglang_static"}, "sglang_static": {"vllm", "vllm_static"}}
FOR_DEVICES = {"masking", "ranking", "draft_head", "embedded", "training", "adapters"}


def imports(path: Path, *, types: bool = False) -> Iterator[str]:
    """The full name of each module that a file imports, also inside functions. types: also those for types alone."""
    typing_only = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            typing_only |= {id(inner) for inner in ast.walk(node)}
        if id(node) in typing_only and not types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide where they lead"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    """The room of a module or of a name in `itemset`: what stands in no room of its own is the package's own."""
    _, _, below = name.partition(".")
    first = below.partition(".")[0]
    known = first and ((ROOT / "itemset" / first).is_dir() or (ROOT / "itemset" / f"{first}.py").exists())
    return first if known else "__init__"


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def found(bad: Callable[[Path, str], object], *packages: str) -> set[str]:
    """The imports of these packages' modules that are bad."""
    each = ((path, name) for package in packages for path in modules(package) for name in imports(path))
    return {f"{name_of(path)} imports {name}" for path, name in each if bad(path, name)}


def test_rooms_import_only_what_the_table_allows() -> None:
    def bad(path: Path, name: str) -> bool:
        own = room(name_of(path))
        return name.partition(".")[0] == "itemset" and room(name) not in {own, *ALLOWED[own].split()}

    assert {room(name_of(path)) for path in modules("itemset")} <= ALLOWED.keys(), "give the room a line in the table"
    assert not found(bad, "itemset")


def test_nothing_runs_back() -> None:
    above: set[str] = set()
    for name, allowed in ALLOWED.items():
        assert set(allowed.split()) <= above, f"{name} may import a room that stands below it"
        above.add(name)
    for name in BESIDE_EACH_OTHER:
        assert not BESIDE_EACH_OTHER & set(ALLOWED[name].split())


def test_the_library_knows_no_engine_and_the_engines_not_each_other() -> None:
    for package, engines in ({"itemset": ENGINES} | OF_ENGINES).items():
        assert not found(lambda _, name, engines=engines: name.partition(".")[0] in engines, package)


def test_no_file_imports_one_that_imports_it() -> None:
    """Type-only imports included."""
    files = {name_of(path): path for package in ["itemset", *OF_ENGINES] for path in modules(package)}
    graph = {}
    for name, path in files.items():
        into = {each.rpartition(".")[0] if each not in files else each for each in imports(path, types=True)}
        graph[name] = into & files.keys() - {name}
    TopologicalSorter(graph).prepare()  # CycleError has the circle


# Each folder of a plugin is a process, and these may import each other: what else crosses is on the wire.
PROCESSES = {
    "vllm_static": {"front": "v1", "core": "worker", "worker": "", "v1": "worker"},
    "sglang_static": {"front": "", "scheduler": ""},
}


def test_no_process_imports_code_of_another() -> None:
    def bad(path: Path, name: str) -> bool:
        own, (package, other) = path.parent.name, f"{name}.".split(".")[:2]
        folders = PROCESSES.get(package, {}) if path.is_relative_to(ROOT / package) else {}
        return {own, other} <= folders.keys() and other not in {own, *folders[own].split()}

    assert not found(bad, *PROCESSES)


def test_front_ends_and_engines_meet_on_the_wire() -> None:
    def bad(path: Path, name: str) -> bool:
        own = path.parent.name
        other = "engine" if own == "front" else "front"
        ours = {"serving", "engine", "front", "core", "worker", "scheduler"}
        return own in ours and name.startswith(f"itemset.serving.{other}.")

    assert not found(bad, "itemset", *OF_ENGINES)


def test_torch_is_only_where_devices_are() -> None:
    of_devices = ("torch", "triton")
    others = lambda path, name: name.partition(".")[0] in of_devices and room(name_of(path)) not in FOR_DEVICES  # noqa: E731
    assert not found(others, "itemset")


def test_the_architecture_page_lists_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listing = page.split("## Rooms")[1].split("```")[1]
    # A line names a module or several, then two spaces or more, then what they do.
    known = {name for line in listing.splitlines() for name in re.split(r",? ", re.split("  +", line.strip())[0])}
    names = {name_of(path): path.stem for package in ["itemset", *OF_ENGINES] for path in modules(package)}
    assert not {name for name, stem in names.items() if stem not in known | {"__init__", "__main__"}}
