"""Draft heads, after NEZHA: a list from the hidden states of one pass, and how a head is trained."""

from itemset.draft_head.head import DraftHead

__all__ = ["DraftHead"]
