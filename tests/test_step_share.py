"""How much of its lists a step makes: what was measured decides, and nothing else."""

from __future__ import annotations

import pytest
import torch

from vllm_static.worker.step_share import KEPT, KINDS, MOST_STEPS, QUIET, Piece, StepShare

REST = len(KINDS)  # of a step, the part that is no list's


def measured(*, rest: float = 0.0, timed: bool = True, rows: int = 512, **fits: tuple[float, float]) -> StepShare:
    """A worker that has measured the rest of a step, in ms, and of each kind of piece a line: ms, and ms a token."""
    share = StepShare(torch.device("cpu"), rows, timed=timed)
    for kind, (fixed, more) in fits.items():
        for tokens in (16, 64, 256):
            share.note(KINDS.index(kind), tokens, fixed + more * tokens)
    if rest:
        share.note(REST, 1, rest)
    return share


def part(share: StepShare, pieces: list[Piece], tokens: list[int], *, others: bool = True) -> list[int]:
    """The rows that a step grants of these pieces, one after another, until one waits."""
    share.step(others=others)
    share.begin()
    granted = list[int]()
    for piece in pieces:
        granted.append(share.grant(piece, tokens))
        if not granted[-1]:
            break
    return granted


def test_the_line_through_what_was_measured() -> None:
    share = measured(logits=(2.0, 0.5))
    assert share.ms("logits", 100) == pytest.approx(52.0)
    assert share.ms("pass", 100) == 0  # of which nothing is known
    share = StepShare(torch.device("cpu"), 512, timed=True)
    share.note(KINDS.index("pass"), 50, 10.0)
    assert share.ms("pass", 25) == pytest.approx(5.0)  # one size alone: in proportion
    share.note(KINDS.index("pass"), 50, 20.0)
    assert share.ms("pass", 50) == pytest.approx((KEPT * 10 + 20) / (KEPT + 1))  # the last counts most


def test_a_part_takes_as_long_as_the_rest_of_the_step() -> None:
    share = measured(rest=10.0, **{"pass": (1.0, 0.01), "logits": (0.5, 0.01)})
    pieces = [Piece("pass", 256), Piece("logits", 256), Piece("pass", 256)]
    assert part(share, pieces, [256, 256]) == [256, 256, 224]  # 3.6 + 3.1 ms, and 3.3 are left


def test_a_long_piece_is_cut() -> None:
    share = measured(rest=10.0, **{"pass": (1.0, 0.1)})
    assert part(share, [Piece("pass", 512)], [512]) == [80]  # of 90 that fit
    assert part(share, [Piece("pass", 512, each=4)], [512]) == [16]  # rows of 4 tokens
    assert part(share, [Piece("choice", 512)], [512]) == [512]  # nothing is known of it, and it comes in one


def test_where_cutting_does_not_help_pieces_stay_long() -> None:
    """A pass of a few rows takes nearly as long as one of many: it is cut to where rows begin to count."""
    share = measured(rest=4.0, **{"pass": (6.0, 0.01)})
    assert part(share, [Piece("pass", 4096)], [512]) == [592]


def test_a_wide_list_has_more_of_each_step() -> None:
    """It is spread over MOST_STEPS parts at most."""
    share = measured(rest=1.0, rows=1 << 20, **{"pass": (0.0, 0.1)})
    pieces = [Piece("pass", 1024)] * 100
    narrow, wide = (sum(part(share, pieces, [tokens])) for tokens in (1024, 64 * 1024))
    assert narrow * MOST_STEPS >= 1024
    assert wide >= 32 * narrow


def test_without_others_a_step_has_the_whole_list() -> None:
    share = measured(rest=1.0, rows=4096, **{"pass": (1.0, 0.1)})
    pieces = [Piece("pass", 1024)] * 4
    assert part(share, pieces, [1024] * 4)[0] < 1024
    for _ in range(QUIET):
        share.step(others=False)
    assert part(share, pieces, [1024] * 4, others=False) == [1024] * 4
    assert part(share, [*pieces, *pieces], [1024] * 4, others=False) == [1024] * 4 + [0]  # as many rows as a step has


def test_given_rows_are_the_only_bound() -> None:
    share = measured(rest=1.0, timed=False, rows=300, **{"pass": (1.0, 0.1)})
    pieces = [Piece("logits", 1), Piece("pass", 256), Piece("logits", 256), Piece("pass", 256)]
    assert part(share, pieces, [256, 256]) == [1, 256, 256, 0]
    assert part(share, [Piece("pass", 1024), Piece("logits", 1024)], [1024]) == [1024, 1024]  # a pass may have more


def test_what_runs_is_measured() -> None:
    share = StepShare(torch.device("cpu"), 512, timed=True)
    share.start_step()
    share.step(others=True)
    with pytest.raises(StopIteration), share.measured(Piece("pass", 8, each=2), 4):
        raise StopIteration  # as the last piece of a list
    share.begin()
    assert 0 < share.ms("pass", 8) < 1e4
    assert part(share, [Piece("pass", 1 << 20)], [8]) != [1 << 20]
