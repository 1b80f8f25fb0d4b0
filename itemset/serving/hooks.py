"""Hooks into an engine that has no interface for what a plugin needs, each declared on the function that it runs.

    @hook("engine.module:Class.function", why="what fails without it")
    def around(original, *args, **kwargs): ...

`hook` is the engine's `Hooks`. Nothing is wrapped before its `install`. To print the table of the docs:
`python -m itemset.serving.hooks vllm_static`, or sglang_static.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

START = "Checked at start-up"
IMPORTED = "Checked once their module is imported"
"""Times of an `install`. Processes differ in what they import, and some modules are slow to import."""

Ours = TypeVar("Ours", bound=Callable[..., Any])
Put = Callable[[str, Callable[..., Any]], None]


class Hook(NamedTuple):
    """target: "module:name.name". put: `wrap` or `extend`. optional: do nothing if the engine has no such target."""

    target: str
    why: str
    put: Put
    ours: Callable[..., Any]
    when: str
    optional: bool


class Hooks:
    """The hooks into one engine, by their targets, in the order of their declaration."""

    def __init__(self, when: str) -> None:
        """when: the time at which a hook is installed, unless it names another."""
        self.declared: dict[str, Hook] = {}
        self._when = when

    def __call__(
        self, *targets: str, why: str, when: str = "", optional: bool = False, put: Put | None = None
    ) -> Callable[[Ours], Ours]:
        """Declare that a function runs around each target: ``ours(original, *args, **kwargs)``.

        Raises ValueError if a target is declared already.
        """

        def declare(ours: Ours) -> Ours:
            for target in targets:
                if target in self.declared:
                    raise ValueError(f"two hooks into {target}: only the first would run")
                self.declared[target] = Hook(target, why, put or wrap, ours, when or self._when, optional)
            return ours

        return declare

    def extends(self, target: str, *, why: str) -> Callable[[Ours], Ours]:
        """Declare a function that is given the target, a class for instance, and changes it. It may get it twice."""
        return self(target, why=why, put=extend)

    def install(self, engine: str, *times: str) -> None:
        """Check and put in place the hooks of these times: now, or for `IMPORTED` once their module is imported.

        engine: its name and version, for the error. Raises RuntimeError that names the hook that the engine lacks, with
        its reason; so does the import of a module that lacks one.
        """
        for hook in self.declared.values():
            if hook.when not in times:
                continue
            put = functools.partial(_put, hook, engine)
            if hook.when == IMPORTED:
                after_import(hook.target.partition(":")[0], put)
            else:
                put()

    def table(self) -> str:
        """Return a Markdown table for each time: what is hooked, and why."""
        lines = []
        for when in dict.fromkeys(hook.when for hook in self.declared.values()):
            lines += [f"{when}:", "", "| hook | why |", "|---|---|"]
            lines += [f"| `{hook.target}` | {hook.why} |" for hook in self.declared.values() if hook.when == when]
            lines.append("")
        return "\n".join(lines)


def check_version(engine: str, installed: str, supported: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Raises RuntimeError where the version is below the first supported one, or above the last."""
    first, last = supported
    version = tuple(int(part) for part in installed.split(".")[: len(first)] if part.isdigit())
    if not first <= version <= last:
        spans = " to ".join(".".join(map(str, version)) for version in supported)
        raise RuntimeError(
            f"static-backend supports {engine} {spans}, this is {installed}: install a supported version, or uninstall "
            "static-backend"
        )


def _put(hook: Hook, engine: str) -> None:
    try:
        _find(hook.target)
    except (ImportError, AttributeError) as error:
        if hook.optional:
            return
        raise RuntimeError(
            f"{engine} has no {hook.target.replace(':', '.')}, which static-backend needs ({hook.why}): install "
            f"another version of {engine.split()[0]}, or uninstall static-backend"
        ) from error
    hook.put(hook.target, hook.ours)


def _find(target: str) -> tuple[Any, str, Any]:
    """Import and return the owner of a target, its name there, and itself. Raises ImportError or AttributeError."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    return owner, name, getattr(owner, name)


def wrap(target: str, around: Callable[..., Any]) -> None:
    """Replace a function by ``around(original, *args, **kwargs)``; once, however often it is called."""
    owner, name, _ = _find(target)
    static = vars(owner)[name]
    original = static.__func__ if isinstance(static, staticmethod | classmethod) else static
    if hasattr(original, "__static_backend__"):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapper.__static_backend__ = True  # type: ignore[attr-defined]
    setattr(owner, name, type(static)(wrapper) if original is not static else wrapper)


def extend(target: str, function: Callable[[Any], Any]) -> None:
    """Give what a target names to the function."""
    function(_find(target)[2])


def after_import(module: str, then: Callable[[], None]) -> None:
    """Call a function as soon as a module has been imported: now, if it has been. Imports nothing itself.

    If the function raises, the import fails, and so does the next one.
    """
    if module in sys.modules:
        then()
        return
    _FINDER.waiting.setdefault(module, []).append(then)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(MetaPathFinder):
    """Finds modules as the other finders do, for as long as something waits for one."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec

    def imported(self, module: str) -> None:
        for then in self.waiting.get(module, ()):
            then()
        self.waiting.pop(module, None)
        if not self.waiting:  # a new list: another thread may be going through the old one
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


_FINDER = _Finder()


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _FINDER.imported(module.__name__)


def main(plugin: str) -> None:
    importlib.import_module(f"{plugin}.plugin")  # imports all modules with hooks
    print(importlib.import_module(f"{plugin}.compat").hook.table(), end="")


if __name__ == "__main__":
    main(sys.argv[1])
