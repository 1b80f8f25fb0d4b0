"""Hooks into a small engine: declared, checked, wrapped once their modules are imported, and passed by where another
backend is chosen."""

from __future__ import annotations

import asyncio
import importlib
import sys

import further
import hooked_names
import pytest

from itemset.errors import ItemSetError
from itemset.serving import hooks
from itemset.serving.hooks import IMPORTED, START, Hooks

ENGINE = """
def plain(a): return [a]
class A:
    def method(self, a): return [self, a]
    @staticmethod
    def static(a): return [a]
    @classmethod
    def made(cls, a): return [cls, a]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of an engine's module that nothing has imported yet."""
    (tmp_path / "hooked_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "hooked_engine"
    sys.modules.pop("hooked_engine", None)
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, hooks._Refusal)]


def around(original):
    return ["ours", *original()]


def chosen(when):
    """Hooks of a process in which our backend is chosen."""
    hook = Hooks(when)
    hook.choose(True)
    return hook


def test_every_kind_of_function_is_wrapped_once_its_module_is_imported(module):
    hook, extended = chosen(IMPORTED), []
    targets = [f"{module}:{name}" for name in ("plain", "A.method", "A.static", "A.made")]
    assert hook(*targets, why="a reason")(around) is around
    hook(f"{module}:A", why="a reason", extends=True)(extended.append)
    hook.install("Engine 1.0", START)
    assert importlib.import_module(module).plain(1) == [1]
    sys.modules.pop(module)
    for _ in range(3):
        hook.install("Engine 1.0", START, IMPORTED)
    assert module not in sys.modules
    engine = importlib.import_module(module)
    a = engine.A()
    assert engine.plain(1) == ["ours", 1]
    assert a.method(1) == ["ours", a, 1]
    assert engine.A.static(1) == a.static(1) == ["ours", 1]
    assert engine.A.made(1) == ["ours", engine.A, 1]
    assert engine.A.method.__name__ == "method"
    assert set(extended) == {engine.A}
    hook.install("Engine 1.0", IMPORTED)
    assert engine.plain(1) == ["ours", 1]


@pytest.mark.parametrize("registry", [False, True])
def test_several_stand_around_one_function_in_their_order(module, registry):
    """Also where the engine's registry takes one hook for each function, as SGLang's does."""
    taken = []

    def put(target, around):
        assert target not in taken
        taken.append(target)
        further._wrap(target, around)

    hook = Hooks(IMPORTED, put if registry else None)
    hook.choose(True)
    for order, name in ((1, "inside"), (-1, "outside"), (0, "between")):

        @hook(f"{module}:A.method", why="a reason", order=order)
        def around(original, a, name=name):
            return [name, *original(a=[name, a])]

    hook.install("Engine 1.0", IMPORTED)
    hook.install("Engine 1.0", IMPORTED)
    a = importlib.import_module(module).A()
    assert a.method(1) == ["outside", "between", "inside", a, ["inside", ["between", ["outside", 1]]]]


NEWER = """
class A:
    def method(self, a, b=2, *, c=3, **more): return {"a": a, "b": b, "c": c, **more}
"""


def test_a_hook_names_what_it_reads_and_passes_on_the_rest(module, tmp_path):
    """Also what a later version of the engine gives, and whether by name or by position."""
    (tmp_path / f"{module}.py").write_text(NEWER)
    seen, hook = [], chosen(START)

    @hook(f"{module}:A.method", why="a reason")
    def around(original, b, c, self, since_later=None):
        seen.append((b, c, type(self).__name__, since_later))
        return original() if b != 0 else original(self=self, b=-1, c=-2)

    hook.install("Engine 1.0", START)
    a = importlib.import_module(module).A()
    assert a.method(1) == {"a": 1, "b": 2, "c": 3}
    assert a.method(1, 5, c=6, unknown=7) == {"a": 1, "b": 5, "c": 6, "unknown": 7}
    assert a.method(b=8, a=1, unknown=9) == {"a": 1, "b": 8, "c": 3, "unknown": 9}
    assert a.method(1, 0, unknown=9) == a.method(b=0, a=1, unknown=9) == {"a": 1, "b": -1, "c": -2, "unknown": 9}
    assert a.method(a=1, b=0, since_later=4)["since_later"] == 4
    assert seen == [
        (2, 3, "A", None),
        (5, 6, "A", None),
        (8, 3, "A", None),
        (0, 3, "A", None),
        (0, 3, "A", None),
        (0, 3, "A", 4),
    ]


def test_the_tests_engines_give_each_hook_an_argument_that_it_does_not_know(module):
    """`further` is in all of them: here a wrapper drops what it is given."""
    assert hooks.wrap is further.wrap
    hooks.wrap(f"{module}:plain", lambda original, a, **dropped: original(a))
    with pytest.raises(TypeError, match=rf"{module}:plain has lost an argument"):
        importlib.import_module(module).plain(1)


def test_an_argument_that_the_engine_lacks_is_named(module):
    hook = chosen(START)

    @hook(f"{module}:plain", why="a reason")
    def around(original, a, gone):
        raise NotImplementedError

    with pytest.raises(RuntimeError, match=r"no hooked_engine\.plain\(gone\), .* \(a reason\): install"):
        hook.install("Engine 1.0", START)


def test_hooks_run_once_a_backend_of_ours_is_chosen(module):
    hook = Hooks(START)
    hook(f"{module}:plain", why="a reason")(around)
    hook(f"{module}:A.static", why="refuses what would be lost", always=True)(around)
    hook.install("Engine 1.0", START)
    engine = importlib.import_module(module)
    assert (engine.plain(1), engine.A.static(1)) == ([1], ["ours", 1])
    assert not hook.choose(False)
    assert engine.plain(1) == [1]
    assert hook.choose(True)
    assert engine.plain(1) == ["ours", 1]
    assert not hook.choose(False)  # another engine of the same process
    assert engine.plain(1) == ["ours", 1]


@pytest.mark.parametrize("target", ["hooked_engine:gone", "hooked_engine:A.gone", "hooked_gone:f"])
def test_a_missing_hook_is_named_at_once_or_at_each_import(module, target):
    sentence = rf"Engine 1\.0 has no {target.replace(':', '.')}, .* \(a reason\): install another version of Engine, "
    for when in (START, "In workers"):
        hook = Hooks(START)
        hook(target, why="a reason", when=when)(around)
        with pytest.raises(RuntimeError, match=sentence):
            hook.install("Engine 1.0", when)
    if target.startswith(module):
        sys.modules.pop(module)
        hook = Hooks(IMPORTED)
        hook.ask()
        hook(f"{module}:plain", target, why="a reason")(around)
        hook.install("Engine 1.0", IMPORTED)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=sentence):
                importlib.import_module(module)


@pytest.mark.parametrize("target", ["hooked_engine:gone", "hooked_engine:A.gone", "hooked_engine:plain"])
def test_an_engine_that_lacks_a_hook_goes_on_with_other_backends(module, target, caplog):
    """It says so once. Who wants our backend then, by name or by the hook that sees it chosen, gets the reason."""
    hook = Hooks(IMPORTED)

    @hook(target, why="a reason")
    def lacking(original, gone):
        raise NotImplementedError

    @hook(f"{module}:A.static", always=True)
    def choosing(original, a):
        """Sees what is chosen."""
        hook.choose(a == "static")
        return original()

    hook.install("Engine 1.0", IMPORTED)
    engine = importlib.import_module(module)
    assert (engine.plain(1), engine.A.static(1)) == ([1], [1])
    (said,) = [one for one in caplog.messages if "is not active" in one]
    assert "Engine 1.0 has no hooked_engine." in said
    assert said.endswith("by `python tests/contract.py engine==1.0` in its checkout")
    for asks in (hook.ask, lambda: hook.choose(True), lambda: engine.A.static("static")):
        with pytest.raises(ItemSetError, match=r"Engine 1\.0 has no hooked_engine"):
            asks()
    assert not hook.choose(False)


def test_a_module_whose_import_fails_is_hooked_when_it_succeeds(module, tmp_path):
    hook = chosen(IMPORTED)
    hook(f"{module}:plain", why="a reason")(around)
    hook.install("Engine 1.0", IMPORTED)
    (tmp_path / f"{module}.py").write_text("raise ImportError")
    with pytest.raises(ImportError):
        importlib.import_module(module)
    (tmp_path / f"{module}.py").write_text(ENGINE)
    importlib.invalidate_caches()
    assert importlib.import_module(module).plain(1) == ["ours", 1]


def test_a_function_is_hooked_by_one_declaration_which_the_table_shows():
    hook = Hooks(START)
    hook("m:f", "m:g", why="a reason")(around)

    @hook("m:h", when="In workers", always=True)
    def documented(original):
        """The docstring says
        why."""

    hook("m:f", why="a third", order=1)(around)
    for again in ({}, {"order": 1}, {"order": 2, "when": "In workers"}):
        with pytest.raises(ValueError, match="two hooks into m:f: give them one time, and an order each"):
            hook("m:f", why="a fourth", **again)(around)
    assert [line for line in hooked_names.table(hook).splitlines() if line] == [
        "Checked at start-up:",
        "| hook | why |",
        "|---|---|",
        "| `m:f` | a reason |",
        "| `m:f` | a third |",
        "| `m:g` | a reason |",
        "In workers:",
        "| hook | why |",
        "|---|---|",
        "| `m:h` * | The docstring says why |",
    ]


FAILING = """
class A:
    def method(self, a):
        if a is None: raise KeyError(a)
        return [a]
    async def later(self, a):
        if a is None: raise KeyError(a)
        return [a]
"""


@pytest.fixture
def failing(module, tmp_path):
    """Hooks into an engine with another backend, and what is to happen in them."""
    (tmp_path / f"{module}.py").write_text(FAILING)
    hook, happens = Hooks(START), {}

    @hook(f"{module}:A.method", why="a reason", always=True)
    def around(original, self, a):
        _ = original() if happens["after"] else None
        raise happens["error"]

    @hook(f"{module}:A.later", why="a reason", always=True)
    async def later(original, self, a):
        result = await original()
        with hook.spared(f"{module}:A.later"):  # what is awaited is no longer in the hook
            raise happens["error"]
        return result

    hook.install("Engine 1.0", START)
    return hook, happens, importlib.import_module(module).A()


@pytest.mark.parametrize("after", [False, True])
def test_a_hook_that_fails_where_another_backend_is_chosen_is_passed_over(failing, caplog, after):
    hook, happens, engine = failing
    happens |= {"after": after, "error": TypeError("a fault of ours")}
    for _ in range(2):
        assert engine.method(1) == [1]
        assert asyncio.run(engine.later(2)) == [2]
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"The hook into hooked_engine:A.{name} has failed, and is passed over: TypeError('a fault of ours')"
        for name in ("method", "later")
    ]
    happens["error"] = ItemSetError("a refusal")
    with pytest.raises(ItemSetError, match="a refusal"):
        engine.method(1)
    with pytest.raises(ItemSetError, match="a refusal"):
        asyncio.run(engine.later(1))
    with pytest.raises(KeyError):  # the engine's own
        asyncio.run(engine.later(None))
    happens["after"] = True
    with pytest.raises(KeyError):
        engine.method(None)
    hook.choose(True)
    happens["error"] = TypeError("a fault of ours")
    with pytest.raises(TypeError, match="a fault of ours"):
        engine.method(1)
    with pytest.raises(TypeError, match="a fault of ours"):
        asyncio.run(engine.later(1))
