"""The direction of imports between the rooms of docs/architecture.md: nothing runs back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


def test_rooms_import_only_what_the_table_allows() -> None:
    forbidden = set()
    for path in modules("itemset"):
        own = room(name_of(path))
        assert own in ALLOWED, f"{path}: give the room {own!r} a line in the table"
        for name in imports(path):
            if name.partition(".")[0] == "itemset" and room(name) not in {own, *ALLOWED[own].split()}:
                forbidden.add(f"{name_of(path)} imports {name}")
    assert not forbidden


def test_nothing_runs_back() -> None:
    above: set[str] = set()
    for name, allowed in ALLOWED.items():
        assert set(allowed.split()) <= above, f"{name} may import a room that stands below it"
        above.add(name)
    for name in BESIDE_EACH_OTHER:
        assert not BESIDE_EACH_OTHER & set(ALLOWED[name].split())


def test_the_library_knows_no_engine_and_the_engines_not_each_other() -> None:
    unknown = {"itemset": ENGINES} | OF_ENGINES
    found = {
        f"{name_of(path)} imports {name}"
        for package, engines in unknown.items()
        for path in modules(package)
        for name in imports(path)
        if name.partition(".")[0] in engines
    }
    assert not found


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
    found = {
        f"{name_of(path)} imports {name}"
        for package, folders in PROCESSES.items()
        for path in modules(package)
        for name in imports(path)
        if path.parent.name in folders
        and name.startswith(f"{package}.")
        and (other := name.split(".")[1]) in folders
        and other not in {path.parent.name, *folders[path.parent.name].split()}
    }
    assert not found


def test_front_ends_and_engines_meet_on_the_wire() -> None:
    found = {
        f"{name_of(path)} imports {name}"
        for package in ["itemset", *OF_ENGINES]
        for path in modules(package)
        for name in imports(path)
        if name.startswith(f"itemset.serving.{'engine' if path.parent.name == 'front' else 'front'}.")
        and path.parent.name in {"serving", "engine", "front", "core", "worker", "scheduler"}
    }
    assert not found


def test_torch_is_only_where_devices_are() -> None:
    found = {
        name_of(path)
        for path in modules("itemset")
        for name in imports(path)
        if name.partition(".")[0] in ("torch", "triton") and room(name_of(path)) not in FOR_DEVICES
    }
    assert not found


def test_the_architecture_page_lists_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listing = page.split("## Rooms")[1].split("```")[1]
    # A line names a module or several, then two spaces or more, then what they do.
    known = {name for line in listing.splitlines() for name in re.split(r",? ", re.split("  +", line.strip())[0])}
    names = {name_of(path): path.stem for package in ["itemset", *OF_ENGINES] for path in modules(package)}
    assert not {name for name, stem in names.items() if stem not in known | {"__init__", "__main__"}}
