"""Finite item sets as tries: built from token ids or texts, kept in one file, walked by one integer of state."""

from itemset.errors import ItemSetError
from itemset.external import build_external
from itemset.item_set import ItemSet, build, build_text, from_bytes, load, verify
from itemset.rows import Rows

__all__ = ["ItemSet", "ItemSetError", "Rows", "build", "build_external", "build_text", "from_bytes", "load", "verify"]
