"""Item sets in the real SGLang engine, on both paths: what is generated, and how requests end."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from asking import CITIES, EOS, answer, inline, named, prompts
from sets import tagged_items, tagged_keys

import itemset

FILLED = "rows of item sets filled at once: "  # cpu/sitecustomize.py
SCHEMA = json.dumps(
    {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
)
TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}})
GRAMMARS = {
    "regex": ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
    "ebnf": ({"ebnf": 'root ::= "x" [0-9] "y"'}, lambda text: text[0] == "x" and text[1].isdigit() and text[2] == "y"),
    "json": ({"json_schema": SCHEMA}, lambda text: json.loads(text)["n"] in (1, 2)),
    "tag": ({"structural_tag": TAG}, lambda text: text == "ab"),
    "cities": ({"choice": CITIES}, lambda text: text in CITIES),
    "free": ({}, lambda text: True),
}


def test_no_answer_is_outside_its_set(engine, named_sets):
    names = list(itertools.islice(itertools.cycle(named_sets), 400))
    outputs = engine.generate(input_ids=prompts(400), sampling_params=list(map(named, names)))
    for name, output in zip(names, outputs, strict=True):
        assert answer(output) in named_sets[name].items
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    distinct = {answer(output) for name, output in zip(names, outputs, strict=True) if name == "large"}
    assert len(distinct) > 30  # the model chooses, not the trie


@pytest.mark.parametrize("turned", [False, True], ids=["sets-first", "grammars-first"])
def test_a_batch_mixes_sets_other_grammars_and_none(engine, named_sets, turned):
    """The first grammar of a batch acts for the whole batch in SGLang: either may be the first."""
    asked = [("set", name) for name in named_sets] + [("grammar", kind) for kind in GRAMMARS]
    asked = (asked[::-1] if turned else asked) * 3
    params = [
        named(what) if kind == "set" else {"max_new_tokens": 60, "temperature": 1.0} | GRAMMARS[what][0]
        for kind, what in asked
    ]
    for (kind, what), output in zip(
        asked, engine.generate(input_ids=prompts(len(asked)), sampling_params=params), strict=True
    ):
        if kind == "set":
            assert answer(output) in named_sets[what].items
        else:
            assert GRAMMARS[what][1](output["text"]), (what, output["text"])


SELECTIONS = [
    ({"item_filter": {"tag": 1}}, lambda i: i % 3 == 1),
    ({"item_filter": {"tag": {"$ne": 1}}, "exclude_keys": tagged_keys()[:300]}, lambda i: i % 3 != 1 and i >= 300),
    ({"only_keys": tagged_keys()[7:27]}, lambda i: 7 <= i < 27),
]


def test_requests_choose_among_the_items(engine, named_sets):
    """By filters, exclusions and candidates, and of a view; all in one batch, and again when they are known."""
    asked = [("tagged", words, keeps) for words, keeps in SELECTIONS]
    asked += [("seen", {"exclude_keys": tagged_keys()[:200]}, lambda i: i % 3 == 0 and i >= 200)]
    asked += [("seen", {}, lambda i: i % 3 == 0), ("tagged", {}, lambda i: True)]
    for _ in range(2):
        params = [named(name, custom_params=dict(words)) for name, words, _ in asked] * 4
        outputs = engine.generate(input_ids=prompts(len(params)), sampling_params=params)
        for (_, _, keeps), output in zip(asked * 4, outputs, strict=True):
            assert answer(output) in {tuple(item) for i, item in enumerate(tagged_items()) if keeps(i)}
        assert len(set(map(answer, outputs))) > 10


def test_a_step_of_the_host_path_fills_its_rows_at_once(engine, path, named_sets):
    params = [named(name) for name in named_sets] + [{"regex": "[0-9]{12}", "max_new_tokens": 40}]
    before = len(engine.log())
    outputs = engine.generate(input_ids=prompts(len(params)), sampling_params=params)
    tokens = sum(len(output["output_ids"]) for output in outputs[:-1])
    rows = [int(line.split()[0]) for line in engine.log()[before:].split(FILLED)[1:]]
    if path == "device":
        assert not rows
        return
    assert max(rows) == len(named_sets)
    assert len(rows) <= tokens / 2
    assert sum(rows) >= tokens  # no row went another way


def test_an_item_may_be_a_prefix_of_another(engine):
    outputs = engine.generate(input_ids=prompts(80), sampling_params=named("prefixes"))
    assert {len(answer(output)) for output in outputs} >= {1, 2}


def test_both_paths_give_the_same_answers_at_temperature_0(static, named_sets):
    names = [name for name in named_sets for _ in range(3)]
    params = [named(name, temperature=0) for name in names] + [inline(CITIES, temperature=0)]
    device, host = (
        [
            output["output_ids"]
            for output in static(path).generate(input_ids=prompts(len(params)), sampling_params=params)
        ]
        for path in ("device", "host")
    )
    assert device == host


def test_ignore_eos_goes_on_with_stop_tokens_only(engine, named_sets):
    params = named("prefixes", ignore_eos=True, max_new_tokens=24)
    for output in engine.generate(input_ids=prompts(6), sampling_params=params):
        tokens = output["output_ids"]
        item = tuple(itertools.takewhile(lambda token: token != EOS, tokens))
        assert item in named_sets["prefixes"].items
        assert set(tokens[len(item) :]) == {EOS}
        assert (len(tokens), output["meta_info"]["finish_reason"]["type"]) == (24, "length")


def test_stop_token_ids_end_an_item_too(engine, named_sets):
    params = named("labels", stop_token_ids=[60, 61])
    ends = set()
    for output in engine.generate(input_ids=prompts(16), sampling_params=params):
        *item, end = output["output_ids"]
        assert tuple(item) in named_sets["labels"].items
        ends.add(end)
    assert ends <= {EOS, 60, 61}
    assert ends & {60, 61}


def test_max_new_tokens_cuts_inside_an_item(engine, named_sets):
    (output,) = engine.generate(input_ids=prompts(1), sampling_params=named("one", max_new_tokens=3))
    assert tuple(output["output_ids"]) == (300, 301, 302)
    assert output["meta_info"]["finish_reason"]["type"] == "length"
    (output,) = engine.generate(input_ids=prompts(1), sampling_params=named("one", max_new_tokens=5))
    assert tuple(output["output_ids"]) in named_sets["one"].items


def test_min_new_tokens_holds_the_stop_back(engine):
    for output in engine.generate(input_ids=prompts(4), sampling_params=named("one", min_new_tokens=5)):
        assert answer(output) == (300, 301, 302, 303, 304)


def test_n_gives_independent_items(engine, named_sets):
    outputs = engine.generate(input_ids=prompts(2), sampling_params=named("large", n=4))
    answers = {answer(output) for output in outputs}
    assert answers <= named_sets["large"].items
    assert len(outputs) == 8
    assert len(answers) > 4


def test_stop_strings_end_inside_an_item(engine):
    output = engine.generate("p", inline(["one two three"], stop=[" two"]))
    assert output["text"] == "one"


def test_logprobs_are_those_after_the_mask(engine, named_sets):
    (output,) = engine.generate(
        input_ids=prompts(1), sampling_params=named("large", temperature=0), return_logprob=True, top_logprobs_num=2
    )
    chosen = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
    assert len(chosen) == len(output["output_ids"])
    assert np.isfinite(chosen).all()
    (output,) = engine.generate(input_ids=prompts(1), sampling_params=named("one"), return_logprob=True)
    forced = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
    assert np.allclose(forced, 0, atol=1e-5)


def test_streaming(engine, named_sets):
    pieces = engine.generate("p", named("ragged"), stream=True)
    assert len(pieces) > 1
    assert answer(pieces[-1]) in named_sets["ragged"].items


def test_prefix_cache_and_chunked_prefill(static, path, named_sets):
    engine = static(path, chunked_prefill_size=32)
    for _ in range(2):
        outputs = engine.generate(input_ids=[list(range(200, 330))] * 4, sampling_params=named("ragged"))
        for output in outputs:
            assert answer(output) in named_sets["ragged"].items
    assert outputs[-1]["meta_info"]["cached_tokens"] > 100


def test_chunks_mixed_with_decoding(static, path, named_sets):
    engine = static(path, chunked_prefill_size=32, enable_mixed_chunk=True)
    names = [name for name in named_sets for _ in range(5)]
    long = [[200 + i] * (5 + 37 * (i % 4)) for i in range(len(names))]
    for name, output in zip(
        names, engine.generate(input_ids=long, sampling_params=list(map(named, names))), strict=True
    ):
        assert answer(output) in named_sets[name].items


def test_retraction_and_resumption(engines, tiny_model, path, tmp_path):
    """A request that SGLang retracts for want of memory begins again with what it has sampled so far."""
    items = np.random.default_rng(3).integers(100, 104, (3_000, 60))
    itemset.build(items).save(tmp_path / "long.itemset")
    options = {"grammar_backend": "static", "item_sets": {"long": str(tmp_path / "long.itemset")}}
    short = {"max_total_tokens": 700, "schedule_conservativeness": 0.01, "item_set_kernels": "triton"}
    answers = []
    for more in ({}, short):
        engine = engines(tiny_model, item_set_path=path, **options, **more)
        params = named("long", temperature=0, max_new_tokens=100)
        answers.append([answer(output) for output in engine.generate(input_ids=prompts(16), sampling_params=params)])
    assert answers[0] == answers[1]
    assert set(answers[0]) <= set(map(tuple, items.tolist()))
    assert "Retract requests" in engine.log()
