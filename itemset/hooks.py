"""Hooking functions of an engine that has no interface for what a plugin needs: checked, wrapped, once imported."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Around = Callable[..., Any]
"""What runs around a function: ``around(original, *args, **kwargs)``."""


def later(module: str, name: str) -> Around:
    """A function of a module that is slow to import: imported when the function is first called."""

    def around(*args: Any, **kwargs: Any) -> Any:
        return resolved(around)(*args, **kwargs)

    around.__static_later__ = (module, name)  # type: ignore[attr-defined]
    return around


def resolved(around: Around) -> Around:
    """The function itself, if `later` stands for it."""
    module, name = getattr(around, "__static_later__", (None, ""))
    return around if module is None else getattr(importlib.import_module(module), name)


def exists(hook: str) -> bool:
    """Whether there is the function that `hook`, "module:name.name", names."""
    module, _, path = hook.partition(":")
    try:
        functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


def check(engine: str, hooks: Mapping[str, str]) -> None:
    """Raises RuntimeError that names the engine with its version and the hook, with its reason, that it lacks."""
    for hook, reason in hooks.items():
        if not exists(hook):
            raise RuntimeError(
                f"{engine} has no {hook.replace(':', '.')}, which static-backend needs ({reason}): install another "
                f"version of {engine.split()[0]}, or uninstall static-backend"
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


def wrap(hook: str, around: Around) -> None:
    """Replace the function `hook` names by ``around(original, *args, **kwargs)``; once, however often it is called.

    Nothing happens where there is no such function.
    """
    if not exists(hook):
        return
    module, _, path = hook.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    static = owner.__dict__[name]
    original = static.__func__ if isinstance(static, staticmethod | classmethod) else static
    if hasattr(original, "__static_backend__"):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapper.__static_backend__ = True  # type: ignore[attr-defined]
    setattr(owner, name, type(static)(wrapper) if original is not static else wrapper)


def after_import(module: str, then: Callable[[], None]) -> None:
    """Call a function as soon as a module has been imported: now, if it has been. Imports nothing itself."""
    if module in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(module, then))


class _AfterImport(MetaPathFinder):
    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module, self._then, self._busy = module, then, False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._module or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenLoader(spec.loader, self._then)
        return spec


class _ThenLoader(Loader):
    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()
