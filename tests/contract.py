"""Whether the plugins work with a release of an engine, on the day of that release and before anybody installs it.

python tests/contract.py                       what is installed here
python tests/contract.py --newest              the newest release that the package index has
python tests/contract.py vllm==0.33.0          this one

A release's Python is put before the installed one's. vLLM's wheel for GPUs runs on a CPU in that way: what is compiled
is the installed CPU build's. Run it where some version of that engine is installed, and with its own Python.

1. Every hook is there and takes what ours names (`hooked_names`).
2. Hooked functions whose source differs from that of the installed version are shown.
3. Tests with real engines of the release run, which call each hooked function.

A release that passes gets a file of hashes in tests/data/contract: those are the versions that `compat.py` supports.
--no-engines omits the third part, and leaves no file. What follows -- goes to pytest.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import hooked_names
from hooked_names import Read
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".cache" / "wheels"
RELEASES = ROOT / ".cache" / "releases"
HASHES = ROOT / "tests" / "data" / "contract"
LINE = 160  # characters of a difference

TESTS = {
    "vllm": [f"tests/test_vllm_{name}.py" for name in ("contract", "draft_models", "engine", "server", "weights")],
    "sglang": [
        f"tests/sglang/test_sglang_{name}.py" for name in ("draft_models", "live", "server", "weights", "wide_lists")
    ],
}
FOR_GPUS = (
    "cuda", "fastsafetensors", "flash", "humming", "instanttensor", "nvidia", "nvtx", "pynv", "quack", "sgl",
    "tilelang", "tokenspeed", "torch",
)  # fmt: skip


def installed_version(engine: str) -> str:
    """Of the distribution that brought the engine, without its build. Raises PackageNotFoundError."""
    compat = importlib.import_module(f"{engine}_static.compat")
    return str(getattr(compat, f"{engine}_version")()).partition("+")[0]


def unpacked(requirement: str) -> Path:
    """A folder with the Python of a release, which can run here: fetched and unpacked once."""
    folder = RELEASES / requirement
    if folder.exists():
        return folder
    WHEELS.mkdir(parents=True, exist_ok=True)
    name, _, version = requirement.partition("==")
    pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(WHEELS), requirement)
    (wheel,) = WHEELS.glob(f"{name.replace('-', '_')}-{version}-*.whl")
    own_parts = name != "vllm"  # else those of the installed build, as a GPU's do not load here
    with tempfile.TemporaryDirectory(dir=WHEELS) as scratch, zipfile.ZipFile(wheel) as archive:
        new = Path(scratch, "new")
        kinds = (".py", ".json", ".jinja", ".html", "METADATA", "entry_points.txt", *([".so"] if own_parts else []))
        archive.extractall(new, [one for one in archive.namelist() if one.endswith(kinds)])
        if not own_parts:
            (info,) = new.glob("vllm-*.dist-info")
            metadata = info / "METADATA"  # whose version says for which platform vLLM has been built
            metadata.write_text(metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n"))
            for compiled in Path(find_spec("vllm").origin).parent.glob("*.so"):
                (new / "vllm" / compiled.name).symlink_to(compiled)
        if lacking := sorted(_lacking(new)):
            print(f"needs, and is given in its folder: {', '.join(lacking)}")
            pip("install", "--no-deps", "--target", str(new), *lacking)
        folder.parent.mkdir(parents=True, exist_ok=True)
        new.rename(folder)
    return folder


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def _lacking(folder: Path) -> Iterator[str]:
    """What a release requires and nothing here is called, but for what GPUs need. Versions are taken as they are."""
    (info,) = folder.glob("*.dist-info")
    here = {canonicalize_name(one.name) for one in importlib.metadata.distributions()}
    for line in importlib.metadata.PathDistribution(info).requires or ():
        one = Requirement(line)
        if one.marker and not one.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(one.name) not in here and not one.name.lower().startswith(FOR_GPUS):
            yield f"{one.name}{one.specifier}"


def source(read: Read, target: str) -> str:
    """A hooked function without its comments and docstring; of a class what it declares; "" if there is none."""
    module, _, path = target.partition(":")
    node = hooked_names.find(read, module, path.split("."))
    if isinstance(node, ast.ClassDef):
        inner = hooked_names.statements(node.body)
        heads = [
            f"def {one.name}({ast.unparse(one.args)}): ..." for one in inner if isinstance(one, hooked_names.Function)
        ]
        return "\n".join([ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)] + heads)
    if isinstance(node, hooked_names.Function) and ast.get_docstring(node) and len(node.body) > 1:
        node.body = node.body[1:]
    return ast.unparse(node) if node else ""


def hashed(read: Read, targets: list[str]) -> dict[str, str]:
    """Sixteen digits for each hooked function, of what Python reads in it: the same in every version of Python."""
    hashes = {}
    for target in sorted(targets):
        words = []
        for node in ast.walk(ast.parse(source(read, target))):
            plain = [value for _, value in ast.iter_fields(node) if isinstance(value, str | bytes | int | float)]
            words.append(f"{type(node).__name__}{plain}")
        hashes[target] = hashlib.sha256("".join(words).encode()).hexdigest()[:16]
    return hashes


def changes(before: Read, after: Read, targets: list[str]) -> list[str]:
    """A line for each hooked function that differs: how many lines, and the first of them."""
    lines = []
    for target in sorted(targets):
        old, new = (source(read, target).splitlines() for read in (before, after))
        differing = [
            line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")
        ]
        if differing:
            counts = [sum(line[0] == sign for line in differing) for sign in "-+"]
            shown = " ".join(" ".join(line.split()) for line in differing)
            lines.append(f"{target}: -{counts[0]} +{counts[1]}: {shown[:LINE]}{'...' if len(shown) > LINE else ''}")
    return lines


def passed(engine: str, parts: int) -> list[tuple[int, ...]]:
    """The releases that have passed, by the first parts of their versions, each once, in order."""
    names = [path.stem.partition("-")[2] for path in HASHES.glob(f"{engine}-*.json")]
    return sorted({tuple(int(part) for part in name.split(".")[:parts]) for name in names})


def stale(engine: str) -> list[str]:
    """Hooked functions of the installed version that differ from those with which it has passed."""
    known = json.loads((HASHES / f"{engine}-{installed_version(engine)}.json").read_text())
    now = hashed(hooked_names.installed(engine), [hook for hook in hooked_names.hooks_of(engine) if hook in known])
    return [hook for hook, value in now.items() if known[hook] != value]


def run(engine: str, folder: Path | None, called: str, pytest_arguments: list[str]) -> int:
    """Run the tests with a release's engine, or the installed one. called: a folder that gets a file for each hooked
    function."""
    paths = [str(path) for path in (folder, ROOT, os.environ.get("PYTHONPATH")) if path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "STATIC_HOOKS_CALLED": called}
    command = [sys.executable, "-m", "pytest", "-q", *TESTS[engine], *pytest_arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def tried(engine: str, release: str | None, pytest_arguments: list[str], engines: bool) -> bool:
    """Whether a release, or the installed version, passes."""
    here = installed_version(engine)
    version = release.partition("==")[2] if release else here
    around = hooked_names.hooks_of(engine)
    wrapped = {target for target, functions in around.items() if functions}
    folder, before = unpacked(release) if release else None, hooked_names.installed(engine)
    after = hooked_names.folder(folder) if folder else before
    print(f"{engine} {version}, by the side of {here}, which is installed")
    problems = hooked_names.problems(after, around)
    differing = changes(before, after, list(around))
    print(f"{len(around) - len(problems)} of {len(around)} hooks take what ours name", *problems, sep="\n  ")
    print(f"{len(differing)} of {len(around)} hooked sources differ from those of {here}", *differing, sep="\n  ")
    if not engines:
        return not problems
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as called:
        code = run(engine, folder, called, pytest_arguments)
        missed = wrapped - set(os.listdir(called))
    print(
        f"{len(wrapped) - len(missed)} of {len(wrapped)} hooked functions were called, but for",
        *sorted(missed),
        sep="\n  ",
    )
    passed = not (problems or code or missed)
    print(f"{engine} {version} {'passes' if passed else 'FAILS'}")
    if passed:
        HASHES.mkdir(exist_ok=True)
        (HASHES / f"{engine}-{version}.json").write_text(json.dumps(hashed(after, list(around)), indent=1) + "\n")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", metavar="ENGINE==VERSION")
    parser.add_argument("--newest", action="store_true", help="the newest release of the engine that is installed")
    parser.add_argument("--no-engines", action="store_true", help="compare the sources alone")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, for_pytest = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    engine = "sglang" if any(one.name == "sglang" for one in importlib.metadata.distributions()) else "vllm"
    releases: list[str | None] = list(arguments.releases)
    if arguments.newest:
        releases.append(f"{engine}=={hooked_names.found(engine)[0]}")
    results = [tried(engine, release, for_pytest, not arguments.no_engines) for release in releases or [None]]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
