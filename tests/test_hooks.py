"""Hooks into a small engine: declared, checked, wrapped once, as soon as their modules are imported."""

from __future__ import annotations

import importlib
import sys

import pytest

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
    """The name of an engine's module that nothing has imported yet. Another test may have left vLLM's hooks waiting."""
    monkeypatch.setattr(hooks, "_FINDER", hooks._Finder())
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, hooks._Finder)])
    (tmp_path / "hooked_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "hooked_engine"
    sys.modules.pop("hooked_engine", None)


def around(original, *args):
    return ["ours", *original(*args)]


def finders():
    return sum(isinstance(finder, hooks._Finder) for finder in sys.meta_path)


def test_every_kind_of_function_is_wrapped_once_its_module_is_imported(module):
    hook, extended = Hooks(IMPORTED), []
    targets = [f"{module}:{name}" for name in ("plain", "A.method", "A.static", "A.made")]
    assert hook(*targets, why="a reason")(around) is around
    hook.extends(f"{module}:A", why="a reason")(extended.append)
    before = finders()
    hook.install("Engine 1.0", START)
    assert (finders(), hooks._FINDER.waiting) == (before, {})
    for _ in range(3):
        hook.install("Engine 1.0", START, IMPORTED)
    assert finders() == 1
    assert module not in sys.modules
    engine = importlib.import_module(module)
    assert finders() == 0
    a = engine.A()
    assert engine.plain(1) == ["ours", 1]
    assert a.method(1) == ["ours", a, 1]
    assert engine.A.static(1) == a.static(1) == ["ours", 1]
    assert engine.A.made(1) == ["ours", engine.A, 1]
    assert engine.A.method.__name__ == "method"
    assert set(extended) == {engine.A}
    hook.install("Engine 1.0", IMPORTED)
    assert engine.plain(1) == ["ours", 1]


@pytest.mark.parametrize("target", ["hooked_engine:gone", "hooked_engine:A.gone", "hooked_gone:f"])
def test_a_missing_hook_is_named_at_once_or_at_each_import(module, target):
    sentence = rf"Engine 1\.0 has no {target.replace(':', '.')}, .* \(a reason\): install another version of Engine, or"
    for when in (START, "In workers"):
        hook = Hooks(START)
        hook(target, why="a reason", when=when)(around)
        with pytest.raises(RuntimeError, match=sentence):
            hook.install("Engine 1.0", when)
    hook = Hooks(START)
    hook(target, why="a reason", optional=True)(around)
    hook.install("Engine 1.0", START)
    if target.startswith(module):
        sys.modules.pop(module)
        hook = Hooks(IMPORTED)
        hook(f"{module}:plain", target, why="a reason")(around)
        hook.install("Engine 1.0", IMPORTED)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=sentence):
                importlib.import_module(module)


def test_a_module_whose_import_fails_is_hooked_when_it_succeeds(module, tmp_path):
    hook = Hooks(IMPORTED)
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
    hook("m:h", why="another", when="In workers")(around)
    with pytest.raises(ValueError, match="two hooks into m:f"):
        hook("m:f", why="a third")(around)
    assert [line for line in hook.table().splitlines() if line] == [
        "Checked at start-up:",
        "| hook | why |",
        "|---|---|",
        "| `m:f` | a reason |",
        "| `m:g` | a reason |",
        "In workers:",
        "| hook | why |",
        "|---|---|",
        "| `m:h` | another |",
    ]
