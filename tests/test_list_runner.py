"""How ranked lists share a server: few requests at a time, in turn, beside others fewer still."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

import itemset
from itemset.ranking.scored_tree import Answer, Pass
from itemset.ranking.search import Found, Search
from itemset.serving.catalogue import RefusedError
from itemset.serving.config import StaticConfig, Words
from itemset.serving.front import list_runner
from itemset.serving.front.list_runner import Lists, OneRequest, Pace, run_together, search_for
from itemset.serving.front.request_fields import ListOptions
from itemset.serving.wire import EngineRequest, ListResult, ListSpec, NoList, SetRef

END = 50
ITEMS = itemset.build(np.random.default_rng(0).integers(0, END, (4_000, 3)))
WORDS = Words("context", "--context", "min_tokens", "--options")


class Engine:
    """Answers one request in a turn of the loop: how many it has at a time, and whose in which order."""

    def __init__(self, seats: int) -> None:
        self.told: list[str] = []
        warn = lambda text, *args: self.told.append(text % args)  # noqa: E731
        self.lists = Lists(seats, lambda: self.unfinished + self.others, warn, shorter="; so does --flag")
        self.unfinished, self.most, self.others = 0, 0, 0
        self.each = 0.0  # seconds that a request takes for each that is there
        self.order: list[str] = []
        self.readers: set[str] = set()

    async def ask(self, name: str, one: Pass) -> Pass:
        self.order.append(name)
        self.unfinished += 1
        self.most = max(self.most, self.unfinished)
        try:
            if self.each:
                await asyncio.sleep(self.each * (self.unfinished + self.others))
            for _ in range(100):
                await asyncio.sleep(0)
        finally:
            self.unfinished -= 1
        return one

    def read(self, one: Pass, output: Pass) -> Answer:
        assert output is one
        self.readers.add(threading.current_thread().name)
        scores = -1.0 - np.modf(np.arange(len(one.tokens) + len(one.after)) * 0.7548776662 + sum(one.tokens) * 0.57)[0]
        return scores[: len(one.tokens) - one.known], scores[len(one.tokens) :]

    async def run(self, name: str, k: int, **more: Any) -> Found:
        search = Search(ITEMS, k, end_token=END, **more)
        return await self.lists.run(search, lambda one: self.ask(name, one), self.read)


def test_few_requests_at_a_time():
    async def lists() -> list[Found]:
        return await asyncio.gather(*(engine.run(str(i), 200) for i in range(3)))

    engine = Engine(64)
    found = asyncio.run(lists())
    assert len(found[0].items) == 200
    assert found[0] == found[1] == found[2]
    assert engine.most == 32  # half of the seats
    assert {name.rpartition("_")[0] for name in engine.readers} == {"ranked-lists"}  # none on the event loop


ALONE = 8  # what lists have alone in any engine of 256 seats
BESIDE: list[tuple[int, int, float, int, int]] = [  # seats, others, seconds a request, items, requests of the list
    *((64, others, 0.0, 200, min(max(others, 2), 32)) for others in (1, 3, 5, 14, 36, 100)),
    *((256, others, 0.002, 20, others) for others in (1, 3, 6)),
    (256, 0, 0.02, 20, ALONE),
]


@pytest.mark.parametrize(("seats", "others", "each", "items", "most"), BESIDE)
def test_how_many_requests_lists_have(monkeypatch, seats, others, each, items, most):
    """As many as the others, up to half of the seats: a few would take them minutes. Where the engine is so slow that
    it answers one request in the time that others may wait, no more than these: whoever comes next waits for all."""
    if each and others:
        monkeypatch.setattr(list_runner, "PATIENCE", 0.001)
    engine = Engine(seats)
    engine.each, engine.others = each, others
    asyncio.run(engine.run("one", items))
    assert engine.most == most


@pytest.mark.parametrize("others", [1, 5, 30])
def test_a_wait_for_others_is_no_slowness_of_lists(others):
    """Steps last as long as all that is in the engine needs: what lists may have does not fall with it."""
    engine = Engine(256)
    engine.each, engine.others = 0.002, others
    asyncio.run(engine.run("one", 60))
    assert engine.most >= max(others, 8)


def test_a_pace_is_what_the_engine_keeps():
    pace = Pace(32)
    assert pace.limit == 1  # nothing is known
    pace.took(2, 0.02)
    assert pace.limit == 10
    for _ in range(100):
        pace.took(10, 0.01)
    assert pace.limit == 32
    for _ in range(100):
        pace.took(32, 10.0)
    assert pace.limit == 1


@pytest.mark.parametrize(("k", "options"), [(3, {}), (5, {"exact": True}), (20, {"width": 64})])
def test_long_lists_say_why_once(monkeypatch, k, options):
    engine = Engine(seats=64)

    async def lists() -> None:
        monkeypatch.setattr(list_runner, "LONG", 1e9)
        await engine.run("short", k, **options)
        assert engine.told == []
        monkeypatch.setattr(list_runner, "LONG", 0.0)
        for _ in range(2):
            await engine.run("long", k, **options)

    asyncio.run(lists())
    (line,) = engine.told
    assert "rounds of requests" in line
    assert line.endswith("shortens lists; so does --flag")


def test_lists_take_turns():
    """A short list is not kept waiting by a long one that came first."""

    async def lists() -> None:
        long = asyncio.ensure_future(engine.run("long", 900))
        while engine.order.count("long") < 100:
            await asyncio.sleep(0)
        before = len(engine.order)
        await engine.run("short", 5)
        during.extend(engine.order[before:])
        await long

    engine, during = Engine(8), list[str]()
    asyncio.run(lists())
    assert "slslsls" in "".join(name[0] for name in during)


def test_a_list_that_is_cancelled_leaves_nothing_behind():
    async def lists() -> Found:
        left = asyncio.ensure_future(engine.run("left", 900))
        while engine.order.count("left") < 100:
            await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        before = len(engine.order)
        found = await engine.run("next", 5)
        assert set(engine.order[before:]) == {"next"}
        return found

    engine = Engine(8)
    assert len(asyncio.run(lists()).items) == 5
    assert engine.unfinished == 0


def test_what_a_request_raises_ends_its_list_alone():
    class FailedError(Exception):
        pass

    async def failing(one: Pass) -> Pass:
        raise FailedError

    async def lists() -> Found:
        with pytest.raises(FailedError):
            await engine.lists.run(Search(ITEMS, 20, end_token=END), failing, engine.read)
        return await engine.run("next", 5)

    engine = Engine(8)
    assert len(asyncio.run(lists()).items) == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 9}, "width=9 finds no 10 items: set it to at least 10"),
        ({"width": 101}, "a beam of width 101 is longer than this engine's limit of 100: .*ranked_list_limit"),
        (
            {"width": True},
            "width must be a number of beams, at least 1, or a list of such numbers: of each level, not True",
        ),
        ({"max_passes": 501}, "max_passes=501 is more than this engine's limit of 500: .*ranked_list_passes"),
        ({"exact": 1}, "exact must be true or false, not 1"),
    ],
)
def test_bad_options_are_refused(given, message):
    config = StaticConfig(ranked_list_limit=100, ranked_list_passes=500)
    with pytest.raises(RefusedError, match=message) as refused:
        search_for(ITEMS, ListOptions(10, **given), end_token=END, config=config, words=WORDS)
    assert refused.value.param in given
    search = search_for(ITEMS, ListOptions(10, width=100, max_passes=500), end_token=END, config=config, words=WORDS)
    assert (search._width, search._max_passes, search._proof_passes) == (100, 500, 500)


def test_searches_run_together_as_each_alone():
    """Rounds are shared, whichever search ends first."""

    def score(asked: list[tuple[int, Pass]]) -> list[Answer]:
        rounds.append(len({i for i, _ in asked}))
        return [Engine(1).read(one, one) for _, one in asked]

    def searches() -> list[Search]:
        return [Search(ITEMS, k, end_token=END) for k in (3, 40)] + [Search(ITEMS, 9, end_token=END, exact=True)]

    rounds: list[int] = []
    together = run_together(searches(), score)
    assert rounds[0] == 3
    assert len(rounds) == max(best.rounds for best in together)
    assert together == [run_together([search], score)[0] for search in searches()]


def test_refusals_are_remembered_and_logged_once():
    logged: list[str] = []
    refusals = OneRequest(lambda text, reason: logged.append(reason), beams=1, widest=None, too_many="")
    refuse(refusals, NoList.NO_ROOM_NOW, 8)
    assert tried(refusals, "films", 8)
    for width in range(8, 300):
        refuse(refusals, NoList.TOO_DEEP, width)
    assert (tried(refusals, "films", 299), tried(refusals, "films", 8)) == (False, True)  # the oldest are forgotten
    refuse(refusals, NoList.NO_BLOCKS, 8)
    assert not tried(refusals, "others", 1)
    assert logged == [reason.value for reason in (NoList.NO_ROOM_NOW, NoList.TOO_DEEP, NoList.NO_BLOCKS)]


def refuse(one: OneRequest, reason: NoList, width: int, detail: str = "") -> None:
    """The engine says that it does not make a list."""
    carried = EngineRequest(SetRef("films"), ListSpec(1, width, END))
    assert one.outcome(carried, ListResult(reason=reason, detail=detail), None) is None


def tried(one: OneRequest, reference: str, width: int) -> bool:
    """Whether the engine is asked for a list."""
    search = Search(ITEMS, 1, width=width, end_token=END)
    return one.spec(ListOptions(1, width=width), reference, search, END, 0, {}) is not None


def test_why_all_lists_take_rounds_is_said_with_its_mend():
    """At the start, or when the engine has said so; where metrics and `GET /v1/item_sets` are read."""

    def gauge(reason: str) -> float | None:
        return REGISTRY.get_sample_value("item_set:lists_by_rounds", {"reason": reason})

    def made(always: str = "") -> OneRequest:
        given = {"too_many": "", "always": always, "with_mend": "{} (a flag)".format}
        return OneRequest(lambda text, reason: None, beams=1, widest=None, **given)

    assert made("a test's drafts").by_rounds == "a test's drafts (a flag)"
    assert gauge("a test's drafts") == 1
    later = made()
    refuse(later, NoList.NO_ROOM, 8)
    assert later.by_rounds is None
    refuse(later, NoList.NO_BLOCKS, 8, "a test's blocks")
    assert later.by_rounds == "a test's blocks (a flag)"
    assert (gauge("a test's blocks"), gauge(NoList.NO_ROOM.value)) == (1, None)


def test_where_64_beams_have_no_room_the_next_list_has_half():
    logged: list[str] = []
    one = OneRequest(lambda text, reason: logged.append(reason), beams=512, widest=512, too_many="")
    assert one.usual_beams("films") == 512
    for beams, left in ((64, 32), (32, 16), (16, 8)):
        refuse(one, NoList.NO_ROOM, beams)
        assert one.usual_beams("films") == left
        assert not tried(one, "films", beams)
    assert one.usual_beams("songs") == 512


def test_where_the_engine_decides_half_of_its_seats_are_for_beams():
    one = OneRequest(lambda text, reason: None, beams=40, widest=None, too_many="")
    assert one.usual_beams("films") == 20
