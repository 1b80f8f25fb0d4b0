"""The cells of the tables in docs/: what each may be asked for, of both engines and in every way that it has.

`CELLS` is the one list of requests. `test_vllm_inside.py` and `sglang/test_sglang_inside.py` ask their servers and
their engines for all of them, by `cell_asking`. `ELSEWHERE` names the tests of what is no single request.
`test_cells.py` fails if a row of a table is in neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cell_checks import COLOURS, LATE, Check, colour, cut, drawn, inside, listed, one_of, ranked, slate, spelled, title
from inside_cases import EBNF, FILM, KEYS, TITLES

OPENAI = "completions chat"
HTTP = "completions chat responses batch stream generate params"
ALL = f"{HTTP} offline"
NATIVE = "params offline"
"""SGLang's own form, in its `sampling_params`."""


@dataclass(frozen=True)
class Cell:
    """A request. row: what its table's row begins with. words: of the plugin, or of the engine in their place.

    ways: of `cell_asking.WAYS`, those in which it may be asked; an engine that has no such way is not asked so.
    options: fields of the endpoint.
    """

    row: str
    words: Mapping[str, Any]
    check: Check = field(repr=False)
    ways: str = ALL
    engines: str = "vllm sglang"
    options: Mapping[str, Any] = field(default_factory=dict)


def table(section: str, *cells: Cell) -> list[Cell]:
    """Those of one section of a page, by their full names."""
    return [replace(cell, row=f"{section}: {cell.row}") for cell in cells]


SET = {"item_set": "titles"}
SOME = {"item_filter": {"place": {"$gte": 12}}, "exclude_keys": KEYS[17:]}
STEERED = "`boost`, `boost_keys`, `normalise_length`"
UNSEEN = SET | {"exclude_prompt": True}
SEEN = f"I saw {'; '.join(TITLES[:7]).upper()}, and {TITLES[7]}."
LIST = SET | {"use_beam_search": True, "n": 4}
BEAM = SET | {"beam_width": 4}  # SGLang's own word
DRAWS = SET | {"draws": 3, "seed": 7}
INLINE = {"structured_outputs": {"choice": COLOURS}}
THINK = {"list_after": "station", "list": 4}
SAYS_STATION = {"logit_bias": {"474": 100}}
WEIGHED = SET | {"return_set_weight": True}
LONG = {"structured_outputs": {"choice": ["a stop b", "c stop d"]}}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "logit_bias": {"300": 50}} | {
    "presence_penalty": 1.0,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
}

TIP = {"type": "object", "properties": {"film": FILM, "n": {"enum": [1, 2]}}, "required": ["film", "n"]}
N = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TAG = {"begin": "<f>", "content": {"type": "item_set", "item_set": "titles"}, "end": "</f>"}
ONE_TAG = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [TAG], "at_least_one": True, "stop_after_first": True}
TAGS = {"type": "structural_tag", "format": ONE_TAG}
DIGITS = {"type": "structural_tag", "format": {"type": "regex", "pattern": "[0-9]{3}"}}
in_json, in_tag, in_text = (
    inside(r'\{"film": ?"(.*)", ?"n": ?[12]\}', "$.film"),
    inside("<f>(.*)</f>"),
    inside(r"\[(.*?)(?:; [x-z])?\]"),
)
n, digits, letters, xy = (spelled(one) for one in (r'\{"n": ?[12]\}', "[0-9]{3}", "[a-c]{4}", "x[0-9]y"))
XY = 'root ::= "x" [0-9] "y"'


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def structured(row: str, **by_kind: tuple[Any, Check]) -> list[Cell]:
    """In vLLM's `structured_outputs`."""
    ways = "completions chat responses batch stream offline"
    return [
        Cell(row, {"structured_outputs": {kind: one}}, check, ways, "vllm") for kind, (one, check) in by_kind.items()
    ]


def native(row: str, ways: str, **by_kind: tuple[Any, Check]) -> list[Cell]:
    """In SGLang's own fields."""
    return [Cell(row, {kind: one}, check, f"{ways} {NATIVE}", "sglang") for kind, (one, check) in by_kind.items()]


EXTRAS, HELD, OTHER = (
    "the same, by the engine's own field for extras",
    "items inside JSON, tags, grammars",
    "everything else",
)
CELLS = [
    *table(
        "serving: What a request may ask for",
        Cell("a registered set, over HTTP", SET, title, HTTP),
        Cell(EXTRAS, {"vllm_xargs": SET}, title, "completions chat responses stream", "vllm"),
        Cell(EXTRAS, {"custom_params": SET}, title, "completions chat stream", "sglang"),
        Cell(EXTRAS, SET, title, "custom", "sglang"),
        Cell("offline", SET, title, "offline"),
        Cell("some of its items", SET | SOME, one_of(TITLES[12:17])),
        Cell("an inline set", INLINE, colour, "completions chat responses batch stream generate"),
        Cell("an inline set", INLINE, colour, "offline", "vllm"),
        Cell("an inline set", {"choice": COLOURS}, colour, f"{ALL} custom", "sglang"),
        Cell("the same in vLLM's older word, over HTTP", {"guided_choice": COLOURS}, colour, HTTP),
        Cell("the same in vLLM's older word, over HTTP", INLINE | {"guided_choice": None}, colour, OPENAI),
        Cell("the probability of the set along an answer", WEIGHED, one_of(TITLES, "set_weight"), ALL, "vllm"),
        Cell(
            "the probability of the set along an answer",
            WEIGHED,
            one_of(TITLES, "set_weight"),
            "completions chat stream generate params offline",
            "sglang",
        ),
        Cell("several distinct items in one answer", {"slate": SET | {"n": 3}}, slate()),
        Cell("a ranked list after a thought", SET | THINK, listed(4), f"{OPENAI} stream", options=SAYS_STATION),
        Cell(HELD, formatted(TIP), in_json, "completions chat stream"),
        Cell(HELD, {"response_format": TAGS}, in_tag, "completions chat stream"),
        Cell(HELD, {"text": {"format": {"type": "json_schema", "name": "x", "schema": TIP}}}, in_json, "responses"),
        *structured(HELD, json=(TIP, in_json), structural_tag=(json.dumps(TAGS), in_tag), grammar=(EBNF, in_text)),
        *native(HELD, "", json_schema=(json.dumps(TIP), in_json), structural_tag=(json.dumps(TAGS), in_tag)),
        *native(HELD, "completions chat stream", ebnf=(EBNF, in_text)),
        Cell(OTHER, formatted(N), n, "completions chat stream"),
        Cell(OTHER, {"response_format": DIGITS}, digits, "completions chat stream"),
        *structured(OTHER, json=(N, n), regex=("[a-c]{4}", letters), grammar=(XY, xy)),
        *structured(OTHER, structural_tag=(json.dumps(DIGITS), digits)),
        *native(OTHER, "", json_schema=(json.dumps(N), n), structural_tag=(json.dumps(DIGITS), digits)),
        *native(OTHER, "completions chat stream", regex=("[a-c]{4}", letters), ebnf=(XY, xy)),
        Cell("endpoints", SET | {"item_filter": {"place": {"$gte": 12}}}, one_of(LATE)),
    ),
    *table(
        "filters: Some of the items",
        Cell("`item_filter: {...}`", SET | {"item_filter": {"place": {"$gte": 12}}}, one_of(LATE)),
        Cell("`exclude_keys: [...]`", SET | {"exclude_keys": KEYS[:17]}, one_of(TITLES[17:])),
        Cell("`only_keys: [...]`", SET | {"only_keys": KEYS[:2]}, one_of(TITLES[:2])),
        Cell("`exclude_prompt: true`", UNSEEN, title),
        *(
            Cell("`exclude_prompt: true`", words, check, ways, options=options)
            for words, check in (
                (UNSEEN, one_of(TITLES[8:])),
                (UNSEEN | {"item_filter": {"place": {"$lt": 12}}}, one_of(TITLES[8:12])),
            )
            for ways, options in (
                ("completions", {"prompt": SEEN}),
                ("chat stream", {"messages": [{"role": "user", "content": SEEN}]}),
                ("batch", {"messages": [[{"role": "user", "content": SEEN}]] * 2}),
                ("responses", {"input": SEEN}),
            )
        ),
        *(
            Cell("`exclude_prompt: true`", words, check, ways, options=options)
            for words, check in (
                (UNSEEN | {"use_beam_search": True, "n": 9}, ranked(9, among=TITLES[8:])),
                (UNSEEN | {"draws": 11, "replace": False}, drawn(11, distinct=True)),
            )
            for ways, options in (
                ("completions", {"prompt": SEEN}),
                ("chat", {"messages": [{"role": "user", "content": SEEN}]}),
            )
        ),
        Cell("over HTTP", LIST | SOME, ranked(4, among=TITLES[12:17]), OPENAI),
        Cell("offline", LIST | SOME, ranked(4, among=TITLES[12:17]), "offline", "vllm"),
        Cell("offline", BEAM | SOME, ranked(4, among=TITLES[12:17]), NATIVE, "sglang"),
    ),
    *table(
        "serving: How sampling parameters behave",
        Cell("`ignore_eos`", SET, title, OPENAI, options={"ignore_eos": True}),
        Cell("`stop_token_ids`", SET, title, OPENAI, options={"stop_token_ids": [2]}),
        Cell("`stop` (strings)", LONG, cut, OPENAI, options={"stop": ["stop"]}),
        Cell("limit of new tokens", LONG, cut, OPENAI, options={"max_tokens": 2}),
        Cell("`n`", SET, one_of(TITLES, count=3), f"{OPENAI} stream", options={"n": 3}),
        Cell("`seed`, `temperature`, `top_k`", SET, title, OPENAI, options=SAMPLED),
        Cell("`seed`, `temperature`, `top_k`", SET, title, OPENAI, "vllm", {"seed": 3}),
        Cell("`logprobs`", SET, title, "completions", options={"logprobs": 2}),
        Cell("`logprobs`", SET, title, "chat", options={"logprobs": True, "top_logprobs": 2}),
        Cell("beam search", LIST, ranked(4), OPENAI),
    ),
    *table(
        "ranked_lists: Ranked lists",
        Cell("over HTTP", LIST, ranked(4), OPENAI),
        Cell("over HTTP", INLINE | {"use_beam_search": True, "n": 4}, ranked(3, among=COLOURS), OPENAI),
        Cell("offline", LIST, ranked(4), "offline", "vllm"),
        Cell("offline", INLINE | {"use_beam_search": True, "n": 4}, ranked(3, among=COLOURS), "offline", "vllm"),
        Cell("over HTTP", BEAM, ranked(4), NATIVE, "sglang"),
        Cell("over HTTP", {"choice": COLOURS, "beam_width": 4}, ranked(3, among=COLOURS), NATIVE, "sglang"),
        Cell("`width: W`", LIST | {"width": 9}, ranked(4), OPENAI),
        Cell("`width: W`", LIST | {"width": [3, 9]}, ranked(4), OPENAI),
        Cell("`width: W`", LIST | {"width": 9}, ranked(4), "offline", "vllm"),
        Cell("`width: W`", SET | {"beam_width": 9, "n": 4}, ranked(4), NATIVE, "sglang"),
        *(
            Cell(row, {**words, **option}, check, ways, engines)
            for row, option, check in (
                ("`exact: true`", {"exact": True}, ranked(4, proven=True)),
                ("`max_passes: N`", {"max_passes": 60}, ranked(4)),
                ("`renormalised: true`", {"renormalised": True}, ranked(4, shares=True)),
                ("`without_end: true`", {"without_end": True}, ranked(4)),
                ('`at_most: {"brand": 2}`', {"at_most": {"place": 1}}, ranked(4)),
                ("`explore: N`", {"explore": 2}, ranked(2, drawn=2)),
                (STEERED, {"boost": {"place": 0.5}}, ranked(4)),
                (STEERED, {"boost_keys": {KEYS[3]: 2.5}}, ranked(4)),
                (STEERED, {"normalise_length": 1}, ranked(4)),
            )
            for words, ways, engines in (
                (LIST, OPENAI, "vllm sglang"),
                (LIST, "offline", "vllm"),
                (BEAM, NATIVE, "sglang"),
            )
        ),
    ),
    *table(
        "ranked_lists: After a thought",
        *(
            Cell(row, SET | THINK | more, listed(items, count), f"{OPENAI} stream", options=SAYS_STATION | options)
            for row, more, options, items, count in (
                ('`list_after: "</think>"`', {}, {}, 4, 1),
                ("`list: K`", {"list": 2, "width": 9}, {}, 2, 1),
                ("`list: K`", SOME, {}, 4, 1),
                ("`list: K`", {"at_most": {"place": 1}}, {}, 4, 1),
                ("`n: N`", {}, {"n": 3}, 4, 3),
                ("`max_tokens`", {"list_after": "letter"}, {"max_tokens": 3}, 0, 1),
            )
        ),
        Cell(
            "`list: K`",
            UNSEEN | THINK,
            listed(4, among=TITLES[8:]),
            "completions",
            options=SAYS_STATION | {"prompt": SEEN},
        ),
        Cell(
            '`list_after: "</think>"`',
            INLINE | THINK | {"list": 3},
            listed(3, among=COLOURS),
            OPENAI,
            options=SAYS_STATION,
        ),
    ),
    *table(
        "inside: Slates",
        Cell("`item_set`", {"slate": {"item_set": COLOURS, "n": 3}}, slate(among=COLOURS, key=COLOURS.index)),
        Cell("`n`", {"slate": SET | {"n": 3}}, slate(), OPENAI),
        Cell("`separator`", {"slate": SET | {"n": 3, "separator": " |"}}, slate(" |")),
        *(
            Cell("`item_filter`, `exclude_keys`, `only_keys`", {"slate": SET | {"n": 3} | chosen}, slate(among=among))
            for chosen, among in (
                ({"item_filter": {"place": {"$gte": 12}}}, LATE),
                ({"exclude_keys": KEYS[:12]}, LATE),
                ({"only_keys": KEYS[:3]}, TITLES[:3]),
            )
        ),
    ),
    *table(
        "draws: ",
        *(
            Cell(row, DRAWS | option, check, f"{OPENAI} generate {NATIVE}")
            for row, option, check in (
                ("`draws: n`", {}, drawn(3)),
                ("`boost`, `boost_keys`", {"boost": {"place": 0.5}}, drawn(3)),
                ("`boost`, `boost_keys`", {"boost_keys": {KEYS[3]: 2.5}, "temperature": 1.5}, drawn(3)),
                ("`replace: false`", {"replace": False}, drawn(3, distinct=True)),
                ("`seed: N`", {"seed": 3}, drawn(3)),
                ("`max_passes: N`", {"max_passes": 9_000}, drawn(3)),
                ("`approximate: true`", {"max_passes": 3, "width": 2, "approximate": True}, drawn(3, exact=False)),
                ("`width: W`", {"width": 8}, drawn(3)),
                ("`draws: n`", {"draw": "importance", "candidates": 4}, drawn(3, exact=False, importance=True)),
            )
        ),
        Cell("`temperature: T`", DRAWS | {"temperature": 0.5}, drawn(3), f"{OPENAI} {NATIVE}"),
    ),
    *table(
        "publishing: Serving a published set",
        Cell("`item_set_version`", {"item_set": "live"}, one_of(TITLES, "item_set_version")),
        Cell("`item_set_version`", LIST | {"item_set": "live"}, ranked(4, version=True), OPENAI),
        Cell("`item_set_version`", BEAM | {"item_set": "live"}, ranked(4, version=True), NATIVE, "sglang"),
    ),
]

ELSEWHERE = {
    "serving: What a request may ask for": (),
    "serving: How sampling parameters behave": (
        ("end of an item", "engine_tests::test_an_item_may_be_a_prefix_of_another"),
        ("least number of tokens", "engine_tests::test_min_tokens_holds_the_stop_back"),
        ("what could leave a step", "refusal_tests::test_a_bad_request_is_refused_and_the_engine_goes_on"),
        ("what could leave a step", "test_sglang_refusals::test_a_custom_logit_processor_is_refused"),
        ("what puts tokens past every mask", "test_vllm_contract::test_what_forces_tokens_past_the_mask_is_refused"),
        ("streaming, prefix caching", "test_vllm_engine::test_preemption_and_resumption"),
        ("streaming, prefix caching", "test_sglang_engine::test_retraction_and_resumption"),
        ("speculative decoding", "test_vllm_drafts::test_answers_are_those_without_speculation"),
        ("speculative decoding", "test_sglang_speculation::test_answers_are_those_without_speculation"),
        ("reasoning parsers", "test_vllm_device::test_the_set_begins_behind_the_reasoning"),
        ("reasoning parsers", "test_sglang_device::test_the_set_begins_behind_the_reasoning"),
    ),
    "filters: Some of the items": (),
    "ranked_lists: Ranked lists": (("the answer", "cell_checks::ranked"),),
    "ranked_lists: After a thought": (("`list_after: true`", "test_vllm_thoughts::test_thoughts_over_http"),),
    "inside: Slates": (),
    "inside: What an answer says": (
        *((row, "inside_cases::check_json") for row in ("`path`", "`text`", "`set`", "`key`, `keys`")),
        ("`item_set_version`", "live_tests::test_a_version_that_comes_while_long_requests_run"),
    ),
    "draws: ": (*((row, "cell_checks::drawn") for row in ("over HTTP", "offline", "the answer")),),
    "draws: Weights of sampled answers": (
        *((row, "test_vllm_weights::test_a_weight_is_the_legal_mass") for row in ("which logits", "with speculation")),
        *(
            (row, "test_sglang_weights::test_a_weight_is_the_legal_mass")
            for row in ("which logits", "with speculation")
        ),
        ("reasoning", "test_vllm_weights::test_with_weights_estimates"),
        ("no item", "test_vllm_weights::test_a_weight_is_the_legal_mass"),
        ("offline", "cells::WEIGHED"),
        ("what it costs", "test_vllm_weights::test_nothing_is_launched_for_those_who_do_not_ask"),
    ),
    "publishing: ": (("`itemset publish", "test_published::test_the_command"),),
    "publishing: Serving a published set": (
        ("`GET /v1/item_sets`", "live_tests::test_what_is_served_is_listed"),
        ("`POST /v1/item_sets/NAME/refresh`", "live_tests::test_every_request_gets_the_new_version"),
    ),
}
"""By section: the rows, as they begin, that are no single request, and a test of each, or what checks it."""
