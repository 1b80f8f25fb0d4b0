"""Hooks into an engine that has no interface for what a plugin needs, each declared on the function that it runs.

    @hook("engine.module:Class.function", why="what fails without it")
    def around(original, self, request): ...

`hook` is the engine's `Hooks`. Nothing is wrapped before its `install`, and no hook runs before an engine of this
process has chosen our backend (`choose`). A hook names those of the function's arguments that it reads, in any order.
`original` is a `Call`: it passes all arguments on, also those of a later version of the engine. To print the table of
the docs: `python -m itemset.serving.hooks vllm_static`, or sglang_static.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Container, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

START = "Checked at start-up"
IMPORTED = "Checked once their module is imported"
"""Times of an `install`. Processes differ in what they import, and some modules are slow to import."""

Ours = TypeVar("Ours", bound=Callable[..., Any])


class Hook(NamedTuple):
    """target: "module:name.name". extends: give `ours` the target, in place of wrapping it. optional: do nothing if the
    engine has no such target. always: run where another backend is chosen too."""

    target: str
    why: str
    ours: Callable[..., Any]
    when: str
    optional: bool
    always: bool
    extends: bool = False


class Call:
    """One call of a function of the engine's: `call()` makes it with all the arguments that the engine gave,
    `call(name=value)` with other values for those named."""

    __slots__ = ("_args", "_function", "_kwargs", "_places")

    def __init__(
        self, function: Callable[..., Any], places: Mapping[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """places: of the arguments that can be given by position."""
        self._function, self._places, self._args, self._kwargs = function, places, args, kwargs

    def __call__(self, /, **others: Any) -> Any:
        args, kwargs = list(self._args), self._kwargs | others
        for name in others:
            if (place := self._places.get(name, len(args))) < len(args):
                args[place] = kwargs.pop(name)
        return self._function(*args, **kwargs)


class Hooks:
    """The hooks into one engine, by their targets, in the order of their declaration."""

    def __init__(self, when: str) -> None:
        """when: the time at which a hook is installed, unless it names another."""
        self.declared: dict[str, Hook] = {}
        self._when = when
        self._chosen = False

    def __call__(
        self, *targets: str, why: str, when: str = "", optional: bool = False, always: bool = False
    ) -> Callable[[Ours], Ours]:
        """Declare that a function runs around each target: ``ours(original, ...)``, where `original` is a `Call`.

        always: it says which backend is chosen, or refuses what would be lost where it is not ours.
        Raises ValueError if a target is declared already.
        """

        def declare(ours: Ours) -> Ours:
            for target in targets:
                self._declare(Hook(target, why, ours, when or self._when, optional, always))
            return ours

        return declare

    def extends(self, target: str, *, why: str) -> Callable[[Ours], Ours]:
        """Declare a function that is given the target, a class for instance, and changes it. It may get it twice."""

        def declare(ours: Ours) -> Ours:
            self._declare(Hook(target, why, ours, self._when, optional=False, always=True, extends=True))
            return ours

        return declare

    def _declare(self, hook: Hook) -> None:
        if hook.target in self.declared:
            raise ValueError(f"two hooks into {hook.target}: only the first would run")
        self.declared[hook.target] = hook

    def choose(self, ours: bool) -> bool:
        """Let all hooks of this process run from now on if an engine takes our backend. Returns whether it does."""
        self._chosen = self._chosen or ours
        return ours

    def install(self, engine: str, *times: str) -> None:
        """Check and put in place the hooks of these times: now, or for `IMPORTED` once their module is imported.

        engine: its name and version, for the error. Raises RuntimeError that names the hook that the engine lacks, with
        its reason; so does the import of a module that lacks one.
        """
        for hook in self.declared.values():
            if hook.when not in times:
                continue
            put = functools.partial(self._put, hook, engine)
            if hook.when == IMPORTED:
                after_import(hook.target.partition(":")[0], put)
            else:
                put()

    def table(self) -> str:
        """Return a Markdown table for each time: what is hooked, and why. A star: whatever backend is chosen."""
        lines = []
        for when in dict.fromkeys(hook.when for hook in self.declared.values()):
            lines += [f"{when}:", "", "| hook | why |", "|---|---|"]
            for hook in self.declared.values():
                if hook.when == when:
                    lines.append(f"| `{hook.target}`{' *' if hook.always else ''} | {hook.why} |")
            lines.append("")
        return "\n".join(lines)

    def _put(self, hook: Hook, engine: str) -> None:
        try:
            owner, name, found = _find(hook.target)
        except (ImportError, AttributeError) as error:
            if hook.optional:
                return
            raise _lacking(hook, engine, "") from error
        if hook.extends:
            hook.ours(found)
            return
        takes = inspect.signature(_function(owner, name)).parameters
        if gone := absent(takes, hook.ours):
            raise _lacking(hook, engine, f"({gone[0]})")
        wrap(hook.target, self._passing(hook, takes))

    def _passing(self, hook: Hook, takes: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
        """What runs around a function that takes these arguments."""
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        places = {name: i for i, (name, one) in enumerate(takes.items()) if one.kind in by_position}
        reads = [
            (one.name, places.get(one.name, sys.maxsize), takes.get(one.name, one).default) for one in read(hook.ours)
        ]

        def around(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not (hook.always or self._chosen):
                return function(*args, **kwargs)
            given = [args[place] if place < len(args) else kwargs.get(name, usual) for name, place, usual in reads]
            return hook.ours(Call(function, places, args, kwargs), *given)

        return around


def read(ours: Callable[..., Any]) -> list[inspect.Parameter]:
    """The arguments of the engine's function that a hook names."""
    return list(inspect.signature(ours).parameters.values())[1:]


def absent(takes: Container[str], ours: Callable[..., Any]) -> list[str]:
    """Those that the engine's function does not take, but for those with a default: versions may lack them."""
    return [one.name for one in read(ours) if one.name not in takes and one.default is one.empty]


def _lacking(hook: Hook, engine: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"{engine} has no {hook.target.replace(':', '.')}{what}, which static-backend needs ({hook.why}): install "
        f"another version of {engine.split()[0]}, or uninstall static-backend"
    )


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


def _find(target: str) -> tuple[Any, str, Any]:
    """Import and return the owner of a target, its name there, and itself. Raises ImportError or AttributeError."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    return owner, name, getattr(owner, name)


def _function(owner: Any, name: str) -> Any:
    static = vars(owner)[name]
    return static.__func__ if isinstance(static, staticmethod | classmethod) else static


def wrap(target: str, around: Callable[..., Any]) -> None:
    """Replace a function by ``around(original, *args, **kwargs)``; once, however often it is called."""
    owner, name, _ = _find(target)
    static, original = vars(owner)[name], _function(owner, name)
    if hasattr(original, "__static_backend__"):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapper.__static_backend__ = True  # type: ignore[attr-defined]
    setattr(owner, name, type(static)(wrapper) if original is not static else wrapper)


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
