"""Constraints of very many tools: each read anew by the grammar of what it has named, the same answers as by all."""

from __future__ import annotations

import copy
import json
import logging
import random
import re
from typing import Any

import numpy as np
import pytest
import xgrammar
from holes import setting
from real_tokenizers import NAMES
from samples import SAMPLES
from test_long_alternations import by_xgrammar, lists, spells
from tokenizers import AddedToken

from itemset.embedded.composite_grammar import Composite
from itemset.embedded.placement import JSON, TAG
from itemset.embedded.rewrite import of_present_form
from itemset.embedded.tool_list import tool_list
from itemset.serving.engine.long_alternations import LongAlternations

PARTS = ["get", "get_all", "a", "ab", "set", "set-x", "x.y", "mail", "_"]
VALUES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"type": "integer"}, [0, 7, -12]),
    ({"type": "string"}, ["", "a", 'q"', "é }, {"]),
    ({"enum": ["x", "zz"]}, ["x", "zz"]),
    ({"type": "array", "items": {"type": "boolean"}}, [[], [True, False]]),
    ({"$ref": "#/$defs/point"}, [{"x": 3}]),
]
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FORMS = {  # before and after a name, after a call, and between two
    "json": ('{"name": "', '", "parameters": ', "}", ", "),
    "one tag": ('<t>{"name":"', '", "arguments":', "}</t>", ""),
    "two tags": ('<t>\n{"name": "', '", "arguments": ', "}\n</t>", ""),
    "triggered": ("<t>f=", ">\n", "</t>", " or "),
    "older": ("<t>f=", ">", "</t>", " or "),
}


def some_tools(rng: random.Random) -> dict[str, dict[str, Any]]:
    tools = {}
    for name in rng.sample(PARTS, rng.randint(3, 6)):
        keys = rng.sample("pqr", rng.randint(1, 2))
        properties = {key: rng.choice(VALUES)[0] for key in keys}
        tools[name] = {"type": "object", "properties": properties, "required": rng.sample(keys, rng.randint(0, 1))}
    return tools


def constraint(form: str, tools: dict[str, dict[str, Any]]) -> tuple[str, str]:
    if form == "json":
        named = [{"name": {"type": "string", "enum": [name]}, "parameters": one} for name, one in tools.items()]
        each = [{"properties": one, "required": [*one]} for one in named]
        array = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": each}}
        return JSON, json.dumps(array | {"$defs": {"point": POINT}})
    before, after, end, _ = FORMS[form]
    own = {name: one | {"$defs": {"point": POINT}} for name, one in tools.items()}
    if form == "older":
        structures = [{"begin": f"{before}{name}{after}", "schema": one, "end": end} for name, one in own.items()]
        return TAG, json.dumps({"type": "structural_tag", "structures": structures, "triggers": ["<t>"]})
    ways = [(before, end), ('<t>{"name": "', "}</t>")] if form == "two tags" else [(before, end)]
    contents = {name: {"type": "json_schema", "json_schema": one} for name, one in own.items()}
    tags = [
        {"type": "tag", "begin": f"{begin}{name}{after}", "content": content, "end": end}
        for name, content in contents.items()
        for begin, end in ways
    ]
    kind: dict[str, Any] = {"type": "tags_with_separator", "separator": "", "at_least_one": True}
    if form == "triggered":
        kind = {"type": "triggered_tags", "triggers": ["<t>"]}
    return TAG, json.dumps({"type": "structural_tag", "format": {**kind, "tags": tags}})


def an_answer(form: str, tools: dict[str, dict[str, Any]], rng: random.Random) -> str:
    """Calls as they should be, or with another tool's arguments, a name that may be of none, or one wrong sign."""
    before, after, end, between = FORMS[form]
    if form == "two tags" and rng.random() < 0.5:
        before, end, between = '<t>{"name": "', "}</t>", ""
    calls = []
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(tools))
        schema = tools[name if rng.random() < 0.9 else rng.choice(list(tools))]
        keys = [key for key in schema["properties"] if key in schema["required"] or rng.random() < 0.7]
        arguments = {key: rng.choice(next(b for a, b in VALUES if a == schema["properties"][key])) for key in keys}
        called = name if rng.random() < 0.95 else rng.choice(PARTS)
        calls.append(before + called + after + json.dumps(arguments, ensure_ascii=False) + end)
    text = between.join(calls)
    text = f"[{text}]" if form == "json" else f"so {text}" if between == " or " else text
    if rng.random() < 0.2:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "x", '"', " "]) + text[at + 1 :]
    return text


def in_present_form(spec: str) -> str:
    return json.dumps(of_present_form(json.loads(spec))) if '"structures"' in spec else spec


def takes(at: Any, own: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether a text is an answer, by xgrammar."""
    matcher = xgrammar.GrammarMatcher(own)
    return matcher.accept_string(text) and bool(at.mask(matcher)[at.stop >> 5] >> (at.stop & 31) & 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_same_answers_as_by_all_tools(form: str, name: str) -> None:
    at, made, rng = setting(name), lists(name, 2), random.Random(f"{form}{name}")
    right = wrong = 0
    for _ in range(max(15, SAMPLES // 100)):
        tools = some_tools(rng)
        kind, spec = constraint(form, tools)
        assert (listed := tool_list(kind, in_present_form(spec), 2)) is not None
        assert listed.size == len(tools)
        assert (compiled := made.get(kind, spec)) is not None
        assert compiled is made.get(kind, spec)
        own = by_xgrammar(at, kind, in_present_form(spec))
        for _ in range(8):
            text = an_answer(form, tools, rng)
            allowed = takes(at, own, text)
            assert spells(at, Composite(*compiled), text.encode()) == allowed, (spec, text)
            right, wrong = right + allowed, wrong + (not allowed)
    assert min(right, wrong) > 20


HOLES = {
    "json": rb'"name"\s*:\s*"',
    "one tag": rb'<t>{"name":"',
    "two tags": b"<t>",
    "triggered": b"<t>f=",
    "older": b"<t>f=",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_masks_are_xgrammars_but_where_names_stand(form: str, name: str) -> None:
    """A token that may follow is one of xgrammar's. It has more that are a name, or hold a part of one."""
    at, made, rng = setting(name), lists(name, 2), random.Random(f"{form}{name}")
    equal = named = 0
    for _ in range(max(16, SAMPLES // 125)):
        kind, spec = constraint(form, tools := some_tools(rng))
        compiled, answer = made.get(kind, spec), an_answer(form, tools, rng).encode()
        assert compiled is not None
        composite, matcher = Composite(*compiled), xgrammar.GrammarMatcher(by_xgrammar(at, kind, in_present_form(spec)))
        tokens, rows = list[int](), list[Any]()
        while True:
            row = np.zeros(at.vocabulary.model_words, np.int32)
            composite.fill_bitmask(row)
            rows.append(row)
            theirs, text = at.mask(matcher), at.text_of(tokens)
            assert not (row & ~theirs).any(), (spec, text)
            for token in set_bits(theirs & ~row):
                after = text + at.vocabulary.bytes[token]
                ends = [hole.end() for hole in re.finditer(HOLES[form], after)]
                assert ends, (spec, after)
                assert len(text) < ends[-1] + 30, (spec, after)
            equal, named = equal + (row == theirs).all(), named + (row != theirs).any()
            if tokens and rng.random() < 0.3:
                check_rolled_back(composite, tokens[-rng.randint(1, len(tokens)) :], rows)
            left = answer[len(text) :]
            pieces = [token for token in set_bits(row).tolist() if at.vocabulary.bytes[token]]
            fitting = [token for token in pieces if left.startswith(at.vocabulary.bytes[token])]
            if not left or not fitting:
                break
            token = rng.choice(fitting)
            assert composite.accept(token)
            assert matcher.accept_token(token)
            tokens.append(token)
    assert equal > 100
    assert named > 5


def set_bits(row: Any) -> Any:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def check_rolled_back(composite: Composite, last: list[int], rows: list[Any]) -> None:
    """Without these tokens, and with them again, the masks are what they were. rows: the masks, the last one of now."""
    composite.rollback(len(last))
    assert composite.allowed_prefix(last) == last
    for token, before in zip(last, rows[-len(last) - 1 :], strict=False):
        row = np.zeros_like(before)
        composite.fill_bitmask(row)
        assert (row == before).all()
        assert composite.accept(token)


def one_of(*names: str, second: str = "p", **more: Any) -> str:
    named = [{"name": {"const": name}, f"{second}{i if second == 'own' else ''}": more} for i, name in enumerate(names)]
    return json.dumps({"anyOf": [{"properties": one, "required": [*one]} for one in named]})


LEFT = {
    "few": one_of("a", "b"),
    "few, named again": one_of("a", "b", "a", "b"),
    "an escape in a name": one_of("a", "b", 'c"'),
    "no common argument": one_of("a", "b", "c", second="own"),
    "any name": json.dumps({"anyOf": [{"properties": {"name": True, "p": {}}, "required": ["name", "p"]}] * 3}),
    "a schema that takes long": one_of("a", "b", "c", type="string", maxLength=2000),
    "a pattern that takes long": one_of("a", "b", "c", type="string", pattern="x{1,400}"),
    "a reference into another": one_of("a", "b", "c", **{"$ref": "#/anyOf/0/properties/p"}),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_stays_with_xgrammar(why: str) -> None:
    assert tool_list(JSON, LEFT[why], 2) is None


def test_a_tool_that_xgrammar_refuses_is_left_to_it() -> None:
    assert lists("tiny", 2).get(JSON, one_of("a", "b", "c", type="string", pattern="(")) is None
    assert lists("tiny", 2).get(JSON, one_of("a", "b", "c", type="string", pattern="x")) is not None


def test_a_named_tool_is_compiled_once() -> None:
    at, made = setting("tekken"), lists("tekken", 2)
    compiled = made.get(JSON, one_of("a", "b", "c", type="integer"))
    assert compiled is not None
    for count, text in ((2, '{"name":"a","p":7}'), (2, '{"name":"a","p":-1}'), (3, '{"name":"b","p":7}')):
        assert spells(at, Composite(*compiled), text.encode())
        assert len(made._made) == count


def test_a_tools_own_list_may_stay_with_xgrammar() -> None:
    """A special token in it, which answers leave out: the answer that names the tool goes on all the same."""
    at, tokenizer = setting("tiny"), copy.deepcopy(setting("tiny").tokenizer)
    tokenizer.add_tokens([AddedToken("<f>", special=True)], special_tokens=True)
    made = LongAlternations(lambda: at.vocabulary, tokenizer, 2, {}, logging.getLogger(__name__))
    compiled = made.get(JSON, one_of("get", "get_all", "c", enum=["<f>x", "y", "z"]))
    assert compiled is not None
    for name in ("get", "get_all"):
        assert spells(at, Composite(*compiled), f'{{"name":"{name}","p":"y"}}'.encode())


def test_a_longer_name_is_not_compiled_for_its_beginnings() -> None:
    at, made = setting("tiny"), lists("tiny", 2)
    compiled = made.get(JSON, one_of("a", "ab", "abc", "abcd", type="integer"))
    assert compiled is not None
    composite, before = Composite(*compiled), len(made._made)
    text = b'{"name":"abcd"'
    while text:
        token = next(t for t, piece in enumerate(at.vocabulary.bytes) if piece and text.startswith(piece))
        assert composite.accept(token)
        text = text[len(at.vocabulary.bytes[token]) :]
    assert len(made._made) == before + 1


def test_no_request_takes_the_place_of_a_tools_grammar() -> None:
    at, made = setting("tiny"), lists("tiny", 2)
    spec = one_of("a", "b", "c", type="integer")
    compiled, tools = made.get(JSON, spec), tool_list(JSON, spec, 2)
    assert compiled is not None
    assert tools is not None
    assert made.get(JSON, tools.spec(["a"])) is None
    assert spells(at, Composite(*compiled), b'{"name":"a","p":7}')
