"""Tensor parallelism in the real SGLang: two ranks answer, make lists and take versions up alike."""

from __future__ import annotations

import json
import re

import pytest
from asking import CITIES, inline, named, prompts
from engine_tests import check_answers
from live import Films, check_versions
from test_sglang_device import check_items
from test_sglang_live import options, refreshed
from test_sglang_wide_lists import ASKED, CHECKS, WIDE, items, requests, with_rounds


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    return Films(tmp_path_factory.mktemp("sets") / "films")


@pytest.fixture(scope="module")
def ranks(engines, tiny_model, files, films):
    # SGLang gives each rank a NUMA node of its own by default, and ends if there are too few.
    wide = WIDE | {"env": CHECKS | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    given = options(films.folder.parent, "device", item_sets=files["item_sets"] | {"films": str(films.folder)})
    return engines(tiny_model, grammar_backend="static", **files | given, **wide, tp_size=2)


def test_two_ranks_sample_the_same(ranks, named_sets):
    """Every rank has an arena and samples all rows; SGLang lets them agree on the tokens."""
    check_answers(ranks, named_sets, 16)
    assert ranks.log().count("Item sets on cpu") == 2


def test_two_ranks_choose_the_same_beams(ranks):
    for name in ("fixed", "ragged", "shares"):
        before = requests(ranks)
        found = ranks.generate("a film", ASKED[name])
        assert requests(ranks) == before + 1
        expected = with_rounds(ranks, "a film", ASKED[name])
        assert [one[:3] for one in items(found)] == [one[:3] for one in items(expected)]


def test_two_ranks_take_versions_up(ranks, films):
    check_versions(ranks, films, refreshed)


def test_masks_of_grammars_on_the_entry_rank_alone(engines, tiny_model, files, named_sets, films):
    """What SGLang's pull request 39053 will do: sets on the device, sets in JSON and other grammars in one batch."""
    given = options(films.folder.parent, "device", item_sets=files["item_sets"])
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TESTS_SGLANG_ENTRY_RANK": "1"}
    engine = engines(
        tiny_model,
        grammar_backend="static",
        **files | given,
        env=env,
        tp_size=2,
        constrained_json_disable_any_whitespace=True,
    )
    schema = {"type": "object", "properties": {"a": {"type": "string", "item_set": CITIES}}, "required": ["a"]}
    texts = [{"regex": "[0-9]{9}"}, {"json_schema": json.dumps(schema)}, {"regex": "(ab|c){4}"}]
    grammars = [{"temperature": 1.0, "max_new_tokens": 60, **one} for one in texts]
    params = [*map(named, named_sets), inline(CITIES)]
    asked = [*params, *grammars] * 2
    found = engine.generate(input_ids=prompts(len(asked)), sampling_params=asked)
    each = len(asked) // 2
    for half in (found[:each], found[each:]):
        check_items(named_sets, [*named_sets, None], half[: len(params)])
        numbers, field, words = (one["text"] for one in half[len(params) :])
        assert re.fullmatch("[0-9]{9}", numbers)
        assert re.fullmatch("(ab|c){4}", words)
        assert json.loads(field)["a"] in CITIES
    assert "a rank has left the masks of grammars to the first" in engine.log()
