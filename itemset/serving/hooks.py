"""Hooks into an engine that has no interface for what a plugin needs, each declared on the function that it runs.

    @hook("engine.module:Class.function")
    def around(original, self, request):
        'What fails without it.'

Nothing is wrapped before `install`, and no hook runs before an engine of this process has chosen our backend. A hook
that is to run all the same may refuse a request, by ItemSetError. If it fails otherwise, that is logged once, and the
engine's own function counts: what such a hook awaits, it runs in `Hooks.spared`.
"""

import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial, reduce, wraps
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import wrapt

from itemset.errors import ItemSetError

logger = logging.getLogger(__name__)

START = "Checked at start-up"
IMPORTED = "Checked once their module is imported"  # a time of `install`: processes differ in what they import

Ours = TypeVar("Ours", bound=Callable[..., Any])


class Hook(NamedTuple):
    """target: "module:name.name". The others as of `Hooks.__call__`."""

    target: str
    why: str
    ours: Callable[..., Any]
    when: str
    order: int
    always: bool
    extends: bool


class Hooks:
    """The hooks into one engine, in the order of their declaration.

    chosen: whether an engine of this process has taken our backend. asked: whether one wants it. refusal: why none can.
    """

    def __init__(self, when: str, put: Callable[[str, Callable[..., Any]], None] | None = None) -> None:
        """when: the time of hooks that name none. put: wraps functions, not methods, by the engine's own registry."""
        self.declared: list[Hook] = []
        self.chosen, self.asked, self.refusal, self._put = False, False, "", put
        self._when, self._wrapped, self._failed = when, set[str](), set[str]()

    def __call__(
        self, *targets: str, why: str = "", when: str = "", order: int = 0, always: bool = False, extends: bool = False
    ) -> Callable[[Ours], Ours]:
        """Declare that a function runs around each target: ``ours(original, ...)``, with those of the target's
        arguments that it names. `original()` passes on all of them, also those of a later version of the engine,
        `original(name=value)` with another value for one; of several hooks it calls the next one inside.

        why: if the docstring of `ours` does not say it. order: of several, the lowest stands outside. always: run if
        another backend is chosen, too. extends: call ``ours(target)`` at the install, perhaps more than once, and wrap
        nothing. Raises ValueError if a target has one of this order already, or at another time.
        """

        def declare(ours: Ours) -> Ours:
            for target in targets:
                reason = why or " ".join((ours.__doc__ or "").split()).rstrip(".")
                hook = Hook(target, reason, ours, when or self._when, order, always, extends)
                for other in self.declared:
                    if other.target == target and (other.order == order or other.when != hook.when):
                        raise ValueError(f"two hooks into {target}: give them one time, and an order each")
                self.declared.append(hook)
            return ours

        return declare

    def choose(self, ours: bool) -> bool:
        """Let all hooks run from now on if an engine takes ours. Return whether. Raises ItemSetError as `ask`."""
        if ours:
            self.ask()
        self.chosen = self.chosen or ours
        return ours

    def ask(self) -> None:
        """Note that somebody wants our backend. Raises ItemSetError if an engine cannot take it."""
        self.asked = True
        if self.refusal:
            raise ItemSetError(self.refusal)

    def give_up(self, error: RuntimeError) -> None:
        """Leave the engine to other backends, with a warning. Raises the error if somebody wants ours."""
        if self.asked:
            raise error
        if not self.refusal:
            logger.warning("static-backend is not active: %s", error)
            self.refusal = str(error)

    def install(self, engine: str, *times: str) -> None:
        """Check and wrap the hooks of these times: now, or for `IMPORTED` once their module is imported.

        engine: its name and version. Raises RuntimeError for a hook that the engine lacks; so does each later import if
        somebody wants our backend.
        """
        around = dict[str, list[Hook]]()
        for hook in sorted(self.declared, key=lambda hook: -hook.order):
            around.setdefault(hook.target, []).append(hook)
        for target, hooks in around.items():
            if hooks[0].when == IMPORTED and IMPORTED in times:
                wrapt.register_post_import_hook(partial(self._imported, hooks, engine), target.partition(":")[0])
            elif hooks[0].when in times:
                self._install(hooks, engine)

    def _imported(self, hooks: list[Hook], engine: str, module: ModuleType) -> None:
        try:
            self._install(hooks, engine)
        except RuntimeError as error:
            if self.asked:
                sys.meta_path.insert(0, _Refusal(module.__name__, error))  # wrapt calls a hook at one import alone
            self.give_up(error)

    def _install(self, hooks: list[Hook], engine: str) -> None:
        """Install all hooks of one target, the innermost first, as one: an engine's registry takes one a function."""
        first = hooks[0]
        try:
            _, _, target = wrapt.resolve_path(*first.target.split(":"))
        except (ImportError, AttributeError) as error:
            raise _lacking(first, engine, "") from error
        if first.extends:
            first.ours(target)
        elif first.target not in self._wrapped:
            takes = inspect.signature(getattr(target, "__func__", target)).parameters
            for hook in hooks:
                if gone := absent(takes, hook.ours):
                    raise _lacking(hook, engine, f"({gone[0]})")
            wrap(first.target, reduce(_both, [self.around(hook, takes) for hook in hooks]), self._put)
            self._wrapped.add(first.target)

    def around(self, hook: Hook, takes: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
        """Return what runs around a function that takes these arguments."""
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        places = {name: i for i, (name, one) in enumerate(takes.items()) if one.kind in by_position}
        reads = [
            (one.name, places.get(one.name, sys.maxsize), takes.get(one.name, one).default) for one in read(hook.ours)
        ]

        def around(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not (hook.always or self.chosen):
                return function(*args, **kwargs)
            given = [args[place] if place < len(args) else kwargs.get(name, usual) for name, place, usual in reads]
            original = partial(_call, function, places, args, kwargs)
            return hook.ours(original, *given) if self.chosen else self._spare(hook, original, given)

        return around

    def _spare(self, hook: Hook, original: Callable[..., Any], given: list[Any]) -> Any:
        """Run a hook although another backend is chosen: if it fails, the engine's own function still has its way."""
        results, errors = list[Any](), list[Exception]()

        def own(**others: Any) -> Any:
            try:
                results.append(original(**others))
            except Exception as error:
                errors.append(error)
                raise
            return results[-1]

        with self.spared(hook.target, errors):
            return hook.ours(own, *given)
        return results[0] if results else original()

    @contextmanager
    def spared(self, target: str, engines: Container[Exception] = ()) -> Iterator[None]:
        """Log once what fails in the block if another backend is chosen. Raises our refusals and `engines`' errors."""
        try:
            yield
        except Exception as error:
            refused = isinstance(error, ItemSetError) or isinstance(error.__cause__, ItemSetError)
            if refused or self.chosen or error in engines:
                raise
            if target not in self._failed:
                self._failed.add(target)
                logger.error("The hook into %s has failed, and is passed over: %r", target, error, exc_info=error)


def _both(inner: Callable[..., Any], outer: Callable[..., Any]) -> Callable[..., Any]:
    """Return one that stands around a function in place of these two."""

    def around(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return outer(partial(inner, function), *args, **kwargs)

    return around


class _Refusal(MetaPathFinder):
    """Makes further imports of a module fail as the first one did."""

    def __init__(self, module: str, error: RuntimeError) -> None:
        self._module, self._error = module, error

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        if fullname == self._module:
            raise self._error


def _call(
    call: Callable[..., Any], places: Mapping[str, int], args: tuple[Any, ...], kwargs: dict[str, Any], /, **others: Any
) -> Any:
    """Call a function with other values for some arguments. places: of those that can be given by position."""
    values, kwargs = list(args), {**kwargs, **others}
    for name in others:
        if (place := places.get(name, len(args))) < len(args):
            values[place] = kwargs.pop(name)
    return call(*values, **kwargs)


def read(ours: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the engine's arguments that a hook names."""
    return list(inspect.signature(ours).parameters.values())[1:]


def absent(takes: Container[str], ours: Callable[..., Any]) -> list[str]:
    """Return those that the engine's function does not take, but for those with a default."""
    return [one.name for one in read(ours) if one.name not in takes and one.default is one.empty]


def _lacking(hook: Hook, engine: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"{engine} has no {hook.target.replace(':', '.')}{what}, which static-backend needs ({hook.why}): install "
        f"another version of {engine.split()[0]}, choose another backend, or see what differs by "
        f"{_trial(*engine.split(maxsplit=1))}"
    )


def _trial(engine: str, installed: str) -> str:
    return f"`python tests/contract.py {engine.lower()}=={installed.partition('+')[0]}` in its checkout"


class Later:
    """A module that is imported once something in it is asked for: hooks are declared while engines are imported."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


def import_present(package: str, *modules: str) -> None:
    """Import modules with hooks, but for those whose files have been taken out of the package."""
    for name in modules:
        if importlib.util.find_spec(f"{package}.{name}") is not None:
            importlib.import_module(f"{package}.{name}")


def require(base: type, ours: type) -> None:
    """Raises RuntimeError if an engine's class has no more what ours, below it, has in its place."""
    if gone := [name for name in vars(ours) if inspect.isfunction(vars(ours)[name]) and not hasattr(base, name)]:
        raise RuntimeError(
            f"{base.__module__}.{base.__name__} has no {gone[0]}, which static-backend needs: install another version"
        )


@cache  # an engine may load its plugins more than once, and one warning is enough
def check_version(
    engine: str, installed: str, supported: tuple[tuple[int, ...], tuple[int, ...]], broken: Container[str] = ()
) -> None:
    """Warn of a version after the last supported one. Raises RuntimeError for one before the first, or broken."""
    first, last = supported
    version = tuple(int(part) for part in installed.split(".")[: len(first)] if part.isdigit())
    spans = " to ".join(".".join(map(str, version)) for version in supported)
    if version < first or installed in broken:
        raise RuntimeError(
            f"static-backend supports {engine} {spans}, this is {installed}: install a supported version, choose "
            f"another backend, or try this one by {_trial(engine, installed)}"
        )
    if version > last:
        logger.warning(
            f"static-backend has been tried with {engine} {spans}, not with {installed}: try it by "
            f"{_trial(engine, installed)}"
        )


def wrap(target: str, around: Callable[..., Any], put: Callable[[str, Callable[..., Any]], None] | None = None) -> None:
    """Replace a function by ``around(original, *args, **kwargs)``, or let `put` do that if it is no method. A method's
    arguments begin with `self`."""
    owner, name, static = wrapt.resolve_path(*target.split(":"))
    if put is not None and not isinstance(owner, type):
        put(target, around)
        return
    original: Any = getattr(static, "__func__", static)
    kind: Any = type(static)

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, kind(wrapper) if kind in (staticmethod, classmethod) else wrapper)
