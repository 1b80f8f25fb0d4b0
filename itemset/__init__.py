"""Finite item sets as tries: built from token ids or texts, kept in one file, walked by one integer of state.

The names below are imported when they are first asked for: NumPy, Numba and PyArrow take a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from itemset.building.external import build_external
    from itemset.errors import ItemSetError, ItemSetWarning
    from itemset.item_set import ItemSet, build, build_text
    from itemset.opening import from_bytes, load, verify
    from itemset.select.views import view
    from itemset.trie.rows import Rows

__all__ = [
    "ItemSet", "ItemSetError", "ItemSetWarning", "Rows", "build", "build_external", "build_text", "from_bytes", "load",
    "verify", "view",
]  # fmt: skip

_ELSEWHERE = {
    "ItemSetError": "errors", "ItemSetWarning": "errors", "Rows": "trie.rows", "build_external": "building.external",
    "from_bytes": "opening", "load": "opening", "verify": "opening", "view": "select.views",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"itemset.{_ELSEWHERE.get(name, 'item_set')}"), name)
    globals()[name] = value
    return value
