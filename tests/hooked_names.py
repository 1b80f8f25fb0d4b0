"""Whether what the plugins hook is there, with the arguments that they rely on, in any version of an engine.

Only sources are read: of what is installed, of a wheel, or of a release that `contract.py` has unpacked.
`python tests/hooked_names.py` writes the tables of docs/hooks.md, those of the engines that are installed.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from itemset.serving import hooks

PAGE = Path(__file__).parent.parent / "docs" / "hooks.md"
Read = Callable[[str], str | None]
"""The text of a file below site-packages; None if there is none."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
KEYWORD = inspect.Parameter.KEYWORD_ONLY
FOLDED = (ast.If, ast.Try, ast.With)  # statements whose body belongs to the module or class around them


def hooks_of(engine: str) -> dict[str, list[Callable[..., Any]]]:
    """What runs around each function that the plugin for "vllm" or "sglang" hooks; nothing if it is extended."""
    importlib.import_module(f"{engine}_static.plugin")
    around: dict[str, list[Callable[..., Any]]] = {}
    for hook in importlib.import_module(f"{engine}_static.compat").hook.declared:
        around.setdefault(hook.target, []).extend([] if hook.extends else [hook.ours])
    return around


def documented(engine: str) -> str:
    """The tables of an engine's hooks in docs/hooks.md."""
    return PAGE.read_text().partition(f"## {engine}_static\n\n")[2].partition("\n## ")[0]


def table(hook: hooks.Hooks) -> str:
    """A Markdown table for each time: what is hooked, and why. A star: whatever backend is chosen."""
    lines = []
    for when in sorted({one.when for one in hook.declared}):
        lines += [f"{when}:", "", "| hook | why |", "|---|---|"]
        for one in sorted(hook.declared, key=lambda one: (one.target, one.order)):  # whoever was imported first
            if one.when == when:
                lines.append(f"| `{one.target}`{' *' if one.always or one.extends else ''} | {one.why} |")
        lines.append("")
    return "\n".join(lines)


def write_tables() -> None:
    """Put them into docs/hooks.md."""
    for engine in ("vllm", "sglang"):
        if importlib.util.find_spec(engine):
            hooks_of(engine)  # imports all modules with hooks
            hook = importlib.import_module(f"{engine}_static.compat").hook
            before, head, after = PAGE.read_text().partition(f"## {engine}_static\n")
            PAGE.write_text("".join((before, head, "\n", table(hook), *after.partition("\n## ")[1:])))


def problems(read: Read, around: Mapping[str, Sequence[Callable[..., Any]]]) -> list[str]:
    """A sentence for each hook that these sources lack, or that takes other arguments."""
    found = []
    for hook, functions in around.items():
        module, _, path = hook.partition(":")
        node = find(read, module, path.split("."))
        if node is None or (functions and isinstance(node, ast.Assign)):
            found.append(f"{hook} is missing")
        elif functions:
            if isinstance(node, Function):
                found += [f"{hook} {what}" for function in functions for what in mismatches(node, function)]
            else:
                found.append(f"{hook} is no function")
    return found


def find(read: Read, module: str, path: list[str]) -> ast.stmt | None:
    """The definition that `path` names, in the module or where that imports it from; also inherited."""
    tree = parsed(read, module)
    if tree is None:
        return None
    for node in statements(tree.body):
        if isinstance(node, ast.ClassDef | Function) and node.name == path[0]:
            return node if len(path) == 1 else _member(read, module, node, path[1])
        if isinstance(node, ast.Assign) and any(ast.unparse(name) == path[0] for name in node.targets):
            return node
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                if (name.asname or name.name) == path[0]:
                    return find(read, node.module, [name.name, *path[1:]])
    return None


def _member(read: Read, module: str, node: ast.stmt, name: str) -> ast.stmt | None:
    if not isinstance(node, ast.ClassDef):
        return None
    for inner in statements(node.body):
        if isinstance(inner, Function) and inner.name == name:
            return inner
    inherited = (find(read, module, [base.id, name]) for base in node.bases if isinstance(base, ast.Name))
    return next(filter(None, inherited), None)


def mismatches(node: Function, around: Callable[..., Any]) -> Iterator[str]:
    """What our hook names that the function does not take. What it takes besides, a hook passes on."""
    takes = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    yield from (f"takes {', '.join(takes)}, not {name}" for name in hooks.absent(takes, around))


def lossy(hook: hooks.Hooks) -> list[str]:
    """The hooks that lose an argument of a later version, or the answer, while another backend is chosen."""
    lost = []
    for one in hook.declared:
        if not one.extends:
            takes = dict.fromkeys([each.name for each in hooks.read(one.ours)], inspect.Parameter("any", KEYWORD))
            given = {name: object() for name in takes} | {"of_a_later_version": object()}
            answer, function = object(), mock.Mock()
            function.return_value = answer
            result = hook.around(one, takes)(function, **given)
            if inspect.iscoroutine(result):
                with contextlib.suppress(TypeError):  # the function is none of those that are awaited
                    asyncio.run(result)
                function = mock.AsyncMock(return_value=answer)
                result = asyncio.run(hook.around(one, takes)(function, **given))
            if result is not answer or any(call.kwargs != given for call in function.call_args_list):
                lost.append(one.target)
    return lost


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or a class, also under its conditions."""
    for node in body:
        if isinstance(node, FOLDED):
            yield from statements([*node.body, *getattr(node, "orelse", [])])
        else:
            yield node


@cache
def parsed(read: Read, module: str) -> ast.Module | None:
    path = module.replace(".", "/")
    for candidate in (f"{path}.py", f"{path}/__init__.py"):
        text = read(candidate)
        if text is not None:
            return ast.parse(text)
    return None


def installed(engine: str) -> Read:
    """The sources of the engine in this environment, which is not imported."""
    spec = importlib.util.find_spec(engine)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{engine} is not installed here")
    return folder(Path(spec.submodule_search_locations[0]).parent)


def folder(root: Path) -> Read:
    """The sources below a folder such as site-packages; of other packages the installed ones."""

    def read(path: str) -> str | None:
        package = path.partition("/")[0]
        if not (root / package).is_dir():
            return installed(package)(path)
        return (root / path).read_text() if (root / path).is_file() else None

    return read


def wheel(file: Path) -> Read:
    """The sources in a wheel. Those of other packages are the installed ones."""
    archive = zipfile.ZipFile(file)
    names = set(archive.namelist())
    packages = {name.partition("/")[0] for name in names}

    def read(path: str) -> str | None:
        package = path.partition("/")[0]
        if package not in packages:
            return installed(package)(path)
        return archive.read(path).decode() if path in names else None

    return read


def found(requirement: str) -> tuple[str, str]:
    """The version and the address of the wheel that pip would install. Raises CalledProcessError if it finds none."""
    resolve = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--report", "-"]
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", *resolve, requirement], check=True, stdout=subprocess.PIPE
    )
    (wheel,) = json.loads(ended.stdout)["install"]
    return wheel["metadata"]["version"], wheel["download_info"]["url"]


if __name__ == "__main__":
    write_tables()
