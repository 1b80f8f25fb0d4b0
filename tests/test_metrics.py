"""What counts as an illegal answer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import itemset
from itemset.serving import metrics
from itemset.serving.constraint import after
from itemset.serving.front.answer_fields import Expected

END, MARK = 9, 7
ITEMS = itemset.build([[1, 2], [1, 3, 4]])


@pytest.mark.parametrize(
    ("tokens", "stopped", "illegal"),
    [
        ([1, 2, END], True, False),
        ([1, END], True, True),
        ([END], True, True),
        ([1], False, False),  # a limit has cut it
        ([5, MARK, 1, 2, END], True, True),
        ([1, 2, END, END], True, False),
        ([1, 2, END, 5, END], True, True),
    ],
)
def test_an_answer_that_ends_elsewhere_is_illegal(tokens, stopped, illegal):
    assert _counted(Expected(ITEMS, frozenset([END])), tokens, stopped) == illegal


@pytest.mark.parametrize(
    ("tokens", "illegal"), [([5, MARK, 1, 2, END], False), ([5, END], False), ([5, MARK, 1, END], True)]
)
def test_reasoning_without_an_end_has_no_item_yet(tokens, illegal):
    expected = Expected(ITEMS, frozenset([END]), content=partial(after, [MARK]))
    assert _counted(expected, tokens, True) == illegal


class Counted(list[int]):
    """Tokens, and how often some are read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)


def test_what_a_chunk_reads_of_an_answer_is_its_item() -> None:
    """However much stands before it and after it."""
    thought, ended = Counted([5] * 9_000 + [MARK, 1, 2]), Counted([1, 2] + [END] * 9_000)
    assert after([MARK], thought) == [1, 2]
    assert Expected(ITEMS, frozenset([END])).parts(ended, 0)[1] == [1, 2]
    assert max(thought.reads, ended.reads) < 10


def _counted(expected: Expected, tokens: list[int], stopped: bool) -> bool:
    before = metrics.ILLEGAL._value.get()
    told = expected.answer_fields(tokens, cut=False)
    fault = metrics.count_answer(expected, tokens, told, stopped=stopped)
    assert (fault is not None) == (metrics.ILLEGAL._value.get() > before)
    return fault is not None
