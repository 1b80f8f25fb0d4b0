"""Ranked lists as one request of the real SGLang, against the same lists in rounds of requests."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
import pytest
from asking import CITIES, inline, named
from samples import CHURNED
from sets import tagged_keys
from sglang_engines import NGRAM

import itemset
from itemset.errors import ItemSetError
from itemset.ranking.lockstep import rows_of_passes
from sglang_static.scheduler import list_hooks

# SGLang's own checks of its memory: at every step, and that no slot is freed twice.
CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
WIDE: dict[str, Any] = {"max_running_requests": 320, "max_total_tokens": 40_000, "env": CHECKS}


@pytest.fixture(scope="module", params=[False, True], ids=["overlap", "in-turn"])
def either(request, static):
    """With the overlap scheduler, and without."""
    return static("device", **WIDE, disable_overlap_schedule=request.param)


@pytest.fixture
def wide(static):
    return static("device", **WIDE, disable_overlap_schedule=False)


def rounds_only(engine: Any, always: str | None = "a test") -> None:
    def only(engine: Any) -> None:
        engine.tokenizer_manager.static_front_end.one_request.always = always

    engine.call(only)


def with_rounds(engine: Any, prompt: str | None, params: dict[str, Any], ids: list[int] | None = None) -> Any:
    """What an engine answers in rounds."""
    rounds_only(engine)
    try:
        return engine.generate(prompt, params, input_ids=ids)
    finally:
        rounds_only(engine, None)


def items(output: dict[str, Any]) -> list[tuple[Any, ...]]:
    words = ("rank", "key", "keys", "proven", "passes", "rounds")
    found = output["meta_info"]["beam_results"]
    return [(one["output_ids"], one["text"], *(one["meta_info"][word] for word in words)) for one in found]


def check_by_rounds(engine: Any, asked: Any, outputs: Any) -> None:
    """Lists that were asked for together are those that each takes rounds for."""
    for (ids, params), output in zip(asked, outputs, strict=True):
        expected = with_rounds(engine, None, params, ids)
        assert [one[:3] for one in items(output)] == [one[:3] for one in items(expected)]


def scores(output: dict[str, Any]) -> list[float]:
    return [one["meta_info"]["sequence_score"] for one in output["meta_info"]["beam_results"]]


ASKED = {
    "fixed": named("fixed", beam_width=64),
    "all of fixed": named("fixed", beam_width=300),
    "a few of many": named("large", beam_width=100, n=5),
    "labels": named("labels", beam_width=150),
    "ragged": named("ragged", beam_width=20),
    "prefixes": named("prefixes", beam_width=9),
    "narrow": named("prefixes", beam_width=2),
    "one": named("one", beam_width=3),
    "shares": named("ragged", beam_width=20, custom_params={"renormalised": True}),
    "ragged without ends": named("ragged", beam_width=20, custom_params={"without_end": True}),
    "prefixes without ends": named("prefixes", beam_width=5, custom_params={"without_end": True}),
    "labels without ends": named("labels", beam_width=40, custom_params={"without_end": True}),
    "inline": inline(CITIES, beam_width=9),
    "view": named("seen", beam_width=30),
    "filtered": named("tagged", beam_width=30, custom_params={"item_filter": {"tag": 2}}),
    "candidates": named("tagged", beam_width=30, custom_params={"only_keys": tagged_keys()[60:80]}),
    "without": named("seen", beam_width=12, custom_params={"exclude_keys": tagged_keys()[:90], "renormalised": True}),
}


def requests(engine: Any) -> int:
    """How many requests the front end has sent to the engine since this was first asked. A list has one."""
    return engine.call(_requests)


def _requests(engine: Any) -> int:
    manager = engine.tokenizer_manager
    if not hasattr(manager, "requests_sent"):
        manager.requests_sent, original = 0, manager._mark_state_dispatched

        def counted(rid: str) -> None:
            manager.requests_sent += 1
            original(rid)

        manager._mark_state_dispatched = counted
    return manager.requests_sent


@pytest.mark.parametrize("name", ASKED)
def test_a_list_is_one_request_and_the_rounds_find_the_same(wide, name):
    prompt, before = "a film for tonight", requests(wide)
    found = wide.generate(prompt, ASKED[name])
    assert requests(wide) == before + 1
    expected = with_rounds(wide, prompt, ASKED[name])
    assert items(found) == items(expected)
    np.testing.assert_allclose(scores(found), scores(expected), atol=1e-4)


ROUNDS = {"max_passes": 10_000}  # such draws take rounds of requests alone
DRAWS = [
    (named("prefixes", draws=9), 1),
    (named("one", draws=3), 1),
    (named("labels", draws=10, temperature=0.3), None),
    (named("seen", draws=8, width=20), None),
    (named("seen", draws=5, replace=False), None),
    (named("prefixes", draws=40, replace=False), 1),
    (named("fixed", draws=2), None),
    (named("ragged", draws=2, replace=False, width=9), None),
    (named("tagged", draws=4, item_filter={"tag": 2}, only_keys=tagged_keys()[60:66]), 1),
    (inline(CITIES, draws=12, width=9), 1),
]


@pytest.mark.parametrize(("asked", "sent"), DRAWS)
def test_the_draws_of_rounds(wide, asked, sent):
    """With the same seed: what the step decides, and what rounds end after it. sent: requests, where all is decided."""
    prompt, before = "a film for tonight", requests(wide)
    found = wide.generate(prompt, asked | {"sampling_seed": 5})
    assert sent is None or requests(wide) == before + sent
    expected = wide.generate(prompt, asked | {"sampling_seed": 5, **ROUNDS})
    drawn, by_rounds = ([one[:2] for one in draws_in(output)] for output in (found, expected))
    assert drawn == by_rounds
    np.testing.assert_allclose(scores(found), scores(expected), atol=1e-4)
    (took,) = {one[3:] for one in draws_in(found)}
    assert took[0] >= took[1] >= 2


def draws_in(output: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Tokens and text of each draw, and what is said of it; all of them exact."""
    found = output["meta_info"]["beam_results"]
    assert {one["meta_info"]["exact"] for one in found} == {True}
    return [
        (one["output_ids"], one["text"], *(one["meta_info"][w] for w in ("draw", "passes", "rounds"))) for one in found
    ]


def together(engine: Any, asked: list[tuple[list[int], dict[str, Any]]], leave_after: float | None = None) -> list[Any]:
    """The answers to requests at the same time. With `leave_after`, every second client goes, the first at once, others
    after so many seconds and more: None where the answer did not come before. "finished" says which was the first."""
    return engine.call(_together, asked, leave_after)


def _together(engine: Any, asked: list[tuple[list[int], dict[str, Any]]], leave_after: float | None) -> list[Any]:
    finished = count()

    async def one(i: int, ids: list[int], params: dict[str, Any]) -> Any:
        # No answer can come before the event loop has been round once: so soon goes the first.
        waits = None if leave_after is None or i % 2 else max(1e-9, leave_after * (i % 7))
        try:
            output = await asyncio.wait_for(engine.async_generate(input_ids=ids, sampling_params=params), waits)
            return output | {"finished": next(finished)}
        except TimeoutError:
            return None

    async def each() -> list[Any]:
        return await asyncio.gather(*(one(i, ids, params) for i, (ids, params) in enumerate(asked)))

    return engine.loop.run_until_complete(each())


LISTS = [named("fixed", beam_width=50), named("ragged", beam_width=12), named("large", beam_width=30, n=3)]
BOTH = [*LISTS, named("prefixes", draws=6, sampling_seed=3)]


def test_lists_beside_other_requests(either):
    """Lists of several sets and widths, ordinary requests, some with sets or a grammar: none changes another."""
    greedy = {"temperature": 0, "max_new_tokens": 12}
    others = [greedy, named("fixed", temperature=0), greedy | {"regex": "[0-9]{12}"}, named("ragged", temperature=0)]
    asked = [([200 + i, 300, 400 + i], params) for i, params in enumerate(others * 2)]
    alone = together(either, asked)
    lists = [([7, 8, 9 + i], params) for i, params in enumerate(LISTS)]
    expected = [with_rounds(either, None, params, ids) for ids, params in lists]
    mixed = together(either, [pair for pairs in zip(asked, lists * 3, strict=False) for pair in pairs])
    assert [output["output_ids"] for output in mixed[::2]] == [output["output_ids"] for output in alone]
    for found, wanted in zip(mixed[1::2], expected * 3, strict=False):
        assert [one[:3] for one in items(found)] == [one[:3] for one in items(wanted)]
        np.testing.assert_allclose(scores(found), scores(wanted), atol=1e-4)


def test_others_wait_neither_for_lists_that_wait_nor_for_long_steps(either):
    """Each list has most of the rows, so that the others wait for it. It sits out steps of the ordinary requests."""
    greedy, begin = {"temperature": 0, "max_new_tokens": 12}, len(either.log())
    long = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}  # there when the lists' steps begin
    small = [([200 + i, 300], params) for i, params in enumerate((greedy, greedy | {"regex": "[0-9]{9}"}, long))]
    alone = together(either, small)
    lists = [([7, 8, i], named("fixed", beam_width=300)) for i in range(4)]
    *found, first, second, third = together(either, [*lists, *small])
    assert [one["output_ids"] for one in (first, second, third)] == [one["output_ids"] for one in alone]
    assert max(first["finished"], second["finished"]) < max(output["finished"] for output in found)
    assert "lists sit out a step of" in either.log()[begin:]
    check_by_rounds(either, lists, found)


def test_nothing_is_left_of_lists_whose_clients_go(either):
    """Neither a KV slot nor a row. SGLang itself ends the engine if one is missing or freed twice."""
    lists = [([7, 8, i], params) for i, params in enumerate(BOTH * 6)]
    for turn in range(-(-CHURNED // len(lists))):
        outputs = together(either, lists, (0.002, 0.01, 0.03)[turn % 3])
        assert None in outputs
        assert all(output is not None for output in outputs[1::2])
    assert either.generate(input_ids=[7, 8, 1], sampling_params=LISTS[1])["output_ids"] == outputs[1]["output_ids"]
    either.call(lambda engine: engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60)))
    assert set(re.findall("left: .*", either.log())) == {"left: 0 rows, 0 slots"}
    assert set(re.findall("moved slots were reclaimed .*", either.log())) == {"moved slots were reclaimed read"}


def test_a_list_that_ends_early_leaves_no_step_behind(either):
    """The overlap scheduler has launched a step when it reads that the list is over."""
    for ids in ([7, 8], [9], [20, 21, 22]):
        begin = len(either.log())
        params = named("ragged", beam_width=20, n=1)
        found = together(either, [(ids, params)])[0]
        said = either.log()[begin:]
        assert "moved slots were reclaimed read" in said
        assert "UNREAD" not in said
        assert items(found) == items(with_rounds(either, None, params, ids))


def test_choosing_beams_waits_for_nothing_and_leaves_rows_out(either, named_sets):
    """What is read a step later says that there are fewer beams than there could be."""
    begin = len(either.log())
    either.generate("p", LISTS[2])
    chosen = re.findall(r"beams of a list chosen from (\d+) rows, read back: (\d+)", either.log()[begin:])
    rows = [int(count) for count, _ in chosen]
    most = [1, *rows_of_passes(itemset.load(named_sets["large"].path).level_plan, 30)]
    assert {reads for _, reads in chosen} == {"0"}
    assert all(count <= bound for count, bound in zip(rows, most, strict=False))
    assert sum(rows) < sum(most[: len(rows)]) - 10


@pytest.mark.parametrize("prompts", ["a film", ["a film", "another"], "a long evening " * 60])
def test_prompts_of_lists_are_encoded_beside_the_event_loop(wide, prompts):
    """A text of megabytes takes minutes there, for all requests."""
    for params in (ASKED["narrow"], named("prefixes", draws=2, max_new_tokens=9)):
        counts = wide.call(_encoded, prompts, params)
        assert counts == [False] * (1 if isinstance(prompts, str) else len(prompts))


def _encoded(engine: Any, prompts: Any, params: dict[str, Any]) -> list[bool]:
    """Whether each prompt of a request was encoded on the event loop's thread."""
    front_end, loops = engine.tokenizer_manager.static_front_end, list[bool]()
    encode = front_end.encode

    def noted(prompt: str) -> list[int]:
        loops.append(threading.current_thread() is threading.main_thread())
        return encode(prompt)

    front_end.encode = noted
    try:
        with suppress(ItemSetError):  # the long one leaves no room
            engine.generate(prompts, params)
    finally:
        del front_end.encode
    return loops


def test_rounds_where_there_is_no_room(wide):
    before = requests(wide)
    found = wide.generate("a film", named("large", beam_width=400, n=3))
    assert len(found["meta_info"]["beam_results"]) == 3
    assert requests(wide) > before + 1
    assert "rows are more than the engine's 320 requests: raise --max-running-requests" in wide.log()


THOUGHTS: list[tuple[str, dict[str, Any]]] = [
    ("large", {"width": 24}),
    ("prefixes", {"renormalised": True, "item_logprobs": True}),
    ("ragged", {"exact": True, "max_passes": 400}),
    ("large", {"regex": "(station|letter)*", "logit_bias": {"474": 100.0}}),
]


@pytest.mark.parametrize(("name", "options"), THOUGHTS)
def test_a_list_after_a_thought_is_that_of_two_requests(wide, name, options):
    """Of what was said before it, the list's own request computes the last token: the rest is in the prefix cache."""
    prompt, end = [*range(100, 140)], 474
    wide.call(_note_cached)
    thought = named(
        name, max_new_tokens=150, n=3, list=4, list_after="station", **{"logit_bias": {str(end): 6.0}} | options
    )
    inside = wide.call(_items_inside)
    outputs = wide.generate(input_ids=prompt, sampling_params=thought)
    assert wide.call(_items_inside) == inside  # a list's are none
    lengths = sorted(len(prompt) + len(output["output_ids"]) - 1 for output in outputs)
    assert wide.call(_cached) == ([] if "exact" in options else lengths)
    width = options.get("width", 4 if "exact" in options else 64)
    two = named(name, beam_width=width, n=4, max_new_tokens=40, custom_params={**options, "width": None})
    for output in outputs:
        tokens, info = output["output_ids"], output["meta_info"]
        assert info["finish_reason"] == {"type": "stop", "matched": end}
        assert tokens.index(end) == len(tokens) - 1
        assert output["text"].endswith("station")
        best = wide.generate(None, two, input_ids=[*prompt, *tokens])
        found = [one["meta_info"] | {"text": one["text"]} for one in best["meta_info"]["beam_results"][:4]]
        words = ("rank", "key", "keys", "text", "proven")
        assert [[one[word] for word in words] for one in info["items"]] == [
            [one[word] for word in words] for one in found
        ]
        np.testing.assert_allclose(
            [one["score"] for one in info["items"]], [one["sequence_score"] for one in found], atol=1e-4
        )
        assert all(("item_logprobs" in one) is ("item_logprobs" in options) for one in info["items"])


def _salted(engine: Any, salt: str, salts: list[str | None]) -> None:
    """An ordinary request with a salt, and then lists of its prompt with others."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def one(salt: str | None, params: dict[str, Any]) -> None:
        given = GenerateReqInput(input_ids=[*range(300, 340)], sampling_params=params, cache_salt=salt)
        async for _ in engine.tokenizer_manager.generate_request(given):
            pass

    engine.loop.run_until_complete(one(salt, {"max_new_tokens": 1}))
    for each in salts:
        engine.loop.run_until_complete(one(each, named("large", beam_width=24)))


def test_prompts_with_a_cache_salt_share_no_cache_with_others(wide):
    wide.call(_note_cached)
    wide.call(_salted, "a", [None, "a", "b"])
    assert [count > 0 for count in wide.call(_in_order)] == [False, True, False]


def _in_order(engine: Any) -> list[int]:
    from sglang_static.front import list_requests

    return list_requests.cached


def _beside_new_weights(engine: Any, model: str) -> Any:
    from sglang.srt.managers import io_struct as ask_for

    long = {"regex": "(letter){20}station", "logit_bias": {"474": 100.0}}  # of 20 tokens or more, and always at its end
    params = named("large", max_new_tokens=200, list=4, list_after="station", **long)

    async def both() -> Any:
        thought = asyncio.ensure_future(engine.async_generate(input_ids=[*range(100, 140)], sampling_params=params))
        await asyncio.sleep(0.05)
        asked = ask_for.UpdateWeightFromDiskReqInput(model_path=model)
        await engine.tokenizer_manager.update_weights_from_disk(asked)
        return (await thought)["meta_info"]["items"]

    return engine.loop.run_until_complete(asyncio.wait_for(both(), 120))


def test_new_weights_that_come_while_a_thought_is_made(wide, tiny_model):
    """They wait for it, and its list for them: before, each waited for the other, and all requests for both."""
    assert len(wide.call(_beside_new_weights, str(tiny_model))) == 4


def _items_inside(engine: Any) -> float:
    from itemset.serving.metrics import INSIDE

    return sum(sample.value for metric in INSIDE.collect() for sample in metric.samples if "total" in sample.name)


def _note_cached(engine: Any) -> None:
    from sglang_static.front import list_requests

    own = getattr(list_requests, "own_in_one_request", list_requests._in_one_request)
    list_requests.own_in_one_request, list_requests.cached = own, []

    async def noting(*arguments: Any) -> Any:
        result = await own(*arguments)
        list_requests.cached.append(result[2]["cached_tokens"])
        return result

    list_requests._in_one_request = noting


def _cached(engine: Any) -> list[int]:
    from sglang_static.front import list_requests

    return sorted(list_requests.cached)


def test_a_thought_ends_at_one_token_in_sglang(wide):
    with pytest.raises(ValueError, match="list_after has 2 tokens, and SGLang ends an answer at one"):
        wide.generate("p", named("large", list=4, list_after="station letter"))
    output = wide.generate("p", named("large", list=4, list_after="station", max_new_tokens=1))
    assert output["meta_info"]["items"] is None
    assert output["meta_info"]["finish_reason"]["type"] == "length"


def test_rounds_where_a_pass_has_no_memory(static):
    """It is known from the start, for the engine and not for one list."""
    few = {"DEVICE_BYTES": str(list_hooks.SEARCH + 4 * list_hooks.LOGITS * 2112 * 100)}
    small = static("device", **{**WIDE, "env": CHECKS | few})
    assert "passes have memory for 80 rows of 320" in small.log()
    before = requests(small)
    small.generate("a film", ASKED["narrow"])
    assert requests(small) == before + 1
    wider = small.generate("a film", ASKED["all of fixed"])
    assert requests(small) > before + 2
    assert "its 300 rows are more than the 80 that have memory: lower --mem-fraction-static" in small.log()
    assert [one[:3] for one in items(wider)] == [
        one[:3] for one in items(with_rounds(small, "a film", ASKED["all of fixed"]))
    ]


@pytest.mark.parametrize(("free", "rows"), [(0, 0), (9, 0), (10, 1), (45, 3), (130, 13), (10_000, 13)])
def test_as_many_rows_as_have_memory(monkeypatch, free, rows):
    monkeypatch.setattr(list_hooks, "SEARCH", 0)

    def reserve(device, nbytes):
        if nbytes > free:
            raise RuntimeError

    monkeypatch.setattr(list_hooks, "reserve", reserve)
    assert list_hooks.rows_in_memory(13, 10, "cpu") == rows


def test_lists_wait_for_room(static):
    """Each needs most of the KV cache and of the rows. A neighbour is not retracted for them, and none is aborted."""
    small = static("device", max_running_requests=400, max_total_tokens=2_000, env=CHECKS)
    lists = [([7, 8, i], named("fixed", beam_width=300)) for i in range(3)]
    before = requests(small)
    outputs = together(small, [*lists, ([7, 8, 9], named("ragged", temperature=0))])
    assert requests(small) == before + 4
    check_by_rounds(small, lists, outputs[:3])


def test_lists_share_a_step_as_far_as_its_rows_go(static):
    """A pass of one list is never cut. What waits goes on in later steps."""
    small = static("device", **WIDE, max_list_rows_per_step=130)
    lists = [([7, 8, i], params) for i, params in enumerate(LISTS * 3)]
    begin = len(small.log())
    outputs = together(small, [*lists, ([7, 8, 9], named("fixed", beam_width=150))])
    found = re.findall(r"a step of (\d+) lists with (\d+) rows", small.log()[begin:])
    steps = [(int(count), int(rows)) for count, rows in found]
    assert {count for count, _ in steps} >= {1, 2}
    assert all(rows <= 130 for count, rows in steps if count > 1)
    assert max(rows for _, rows in steps) > 130
    check_by_rounds(small, lists, outputs[:-1])


OTHERWISE = {"page_size": 4, "disable_radix_cache": True}


@pytest.mark.parametrize("option", OTHERWISE)
def test_other_caches_give_the_same_answers(static, wide, option):
    """Lists, draws and answers, all at once and again over what is cached; SGLang has no beam search in pages, and
    rounds make them there."""
    greedy = {"temperature": 0, "max_new_tokens": 12}
    params = [*BOTH, named("tagged", draws=3, sampling_seed=3, replace=False), greedy, named("labels", temperature=0)]
    asked = [([7, 8, 9, 10, 11, 12 + i], one) for i, one in enumerate(params * 2)]
    expected = together(wide, asked)
    engine = static("device", **WIDE, **{option: OTHERWISE[option]})
    for _ in range(2):
        for found, wanted in zip(together(engine, asked), expected, strict=True):
            if "beam_results" not in wanted["meta_info"]:
                assert found["output_ids"] == wanted["output_ids"]
                continue
            by_engine = [found["meta_info"]["beam_results"], wanted["meta_info"]["beam_results"]]
            tokens, texts = ([[one[word] for one in each] for each in by_engine] for word in ("output_ids", "text"))
            assert tokens[0] == tokens[1]
            assert texts[0] == texts[1]
            np.testing.assert_allclose(scores(found), scores(wanted), atol=1e-4)


def test_all_are_aborted_at_once_and_nothing_is_left(wide):
    """Ten times, in whatever the lists, draws and answers are then. Those after it are as ever."""
    engine, asked = wide, [([7, 8, i], params) for i, params in enumerate((*BOTH, *BOTH[:2]))]
    asked.append(([7, 8], named("ragged", temperature=0)))
    expected, begin = together(engine, asked), len(engine.log())
    for turn in range(10):
        for output in engine.call(_aborted, asked, 0.004 * turn):
            found = output["meta_info"].get("beam_results", [output])
            assert {one["meta_info"]["finish_reason"]["type"] for one in found} <= {"abort", "stop"}
    again = together(engine, asked)
    assert [one["output_ids"] for one in again] == [one["output_ids"] for one in expected]
    engine.call(lambda engine: engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60)))
    assert set(re.findall("left: .*", engine.log()[begin:])) == {"left: 0 rows, 0 slots"}


def _aborted(engine: Any, asked: list[tuple[list[int], dict[str, Any]]], after: float) -> list[Any]:
    """What is answered to requests that are all taken back after so many seconds."""

    async def each() -> list[Any]:
        answers = [
            asyncio.ensure_future(engine.async_generate(input_ids=ids, sampling_params=one)) for ids, one in asked
        ]
        await asyncio.sleep(after)
        engine.tokenizer_manager.abort_request(abort_all=True)
        _, waiting = await asyncio.wait(answers, timeout=30)
        assert not waiting
        return [one.result() for one in answers]

    return engine.loop.run_until_complete(each())


def test_rounds_where_sglang_has_no_beam_search(static):
    """It says so once, and is not asked again."""
    engine = static("device", **NGRAM)
    for name in ("prefixes", "ragged"):
        assert engine.generate("a film", ASKED[name])["meta_info"]["rounds"] > 2
    said = "Beam search is not supported with speculative decoding."
    assert f"takes rounds of requests: {said}" in engine.log()
    assert engine.log().count(said) == 2  # SGLang's own line, and ours
