"""Constraints that list very many texts: with sets in their places, the same answers as by xgrammar's own grammars."""

from __future__ import annotations

import copy
import json
import logging
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xgrammar
from holes import setting
from real_tokenizers import NAMES
from samples import SAMPLES
from tokenizers import AddedToken

from itemset.embedded.composite_grammar import Composite
from itemset.embedded.placement import EBNF, JSON, LARK, REGEX, TAG
from itemset.embedded.printed import long_alternations
from itemset.embedded.rewrite import Marker
from itemset.errors import ItemSetError
from itemset.serving.engine import long_alternations as of_engine
from itemset.serving.engine.grammars import short_turns
from itemset.serving.engine.long_alternations import LongAlternations

LETTERS = [*"ab éÿ中😀0f|]},'/", '"', "\\", "\n", "\x7f", "\u2028"]
BLANKS = re.compile(r'(?<=[{:])\s+|\s+(?=})|(?<=")\s+(?=:)')
KINDS = [JSON, TAG, EBNF, LARK, REGEX]


def texts_of(rng: random.Random) -> list[str]:
    count, longest = rng.randint(3, 12), rng.choice([2, 4, 8])
    return ["".join(rng.choices(LETTERS, k=rng.randint(1, longest))) for _ in range(count)]


def lists(name: str, least: int = 1, **options: Any) -> LongAlternations:
    at = setting(name)
    return LongAlternations(lambda: at.vocabulary, at.tokenizer, least, options, logging.getLogger(__name__))


def constraint(kind: str, texts: list[str], rng: random.Random) -> tuple[str, str, str, list[str]]:
    """A constraint of a kind, the text before and after the texts in its answers, and these as they stand there."""
    if kind in (JSON, TAG):
        others: list[Any] = rng.choice([[], [None], [3, True, ""]])
        schema = {"type": "object", "properties": {"é1": {"enum": [*texts, *others]}}, "required": ["é1"]}
        spec = json.dumps(schema, ensure_ascii=rng.random() < 0.5)
        written = [json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in [*texts, *others]]
        if kind == JSON:
            return spec, '{"é1": ', "}", written
        tag = {"type": "tag", "begin": "<x>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</x>"}
        return json.dumps({"type": "structural_tag", "format": tag}), '<x>{"é1": ', "}</x>", written
    before, after = rng.choice([("", ""), ("say:", ""), ("(", ")")])
    if kind == REGEX:
        inside = "|".join(re.sub(r"[\\|\[\](){}.*+?^$/]", r"\\\g<0>", text) for text in texts)
        return f"{re.escape(before)}({inside}){re.escape(after)}", before, after, texts
    literals = [json.dumps(text, ensure_ascii=False) for text in texts]
    if kind == LARK:
        return f'start: "{before}" x "{after}"\nx: {" | ".join(literals)}', before, after, texts
    return f'root ::= "{before}" x "{after}"\nx ::= {" | ".join(literals)}', before, after, texts


def by_xgrammar(at: Any, kind: str, spec: str) -> xgrammar.CompiledGrammar:
    of_kind = {JSON: "json_schema", TAG: "structural_tag", EBNF: "grammar", LARK: "lark", REGEX: "regex"}
    return getattr(at.plain, f"compile_{of_kind[kind]}")(spec)


def spells(at: Any, composite: Composite, text: bytes, failed: set[Any] | None = None) -> bool:
    """Whether some tokens of a text are an answer. failed: with what is left, the readings from which none are."""
    failed = set() if failed is None else failed
    key = len(text), frozenset((id(one.holes), one.hole, one.state) for one in composite._history[-1])
    if key in failed:
        return False
    row = np.zeros(at.vocabulary.model_words, np.int32)
    composite.fill_bitmask(row)
    for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: at.vocabulary.size]).tolist():
        piece = at.vocabulary.bytes[token]
        if token == at.stop:
            if not text:
                return True
        elif piece and text.startswith(piece):
            assert composite.accept(token)
            if spells(at, composite, text[len(piece) :], failed):
                return True
            composite.rollback(1)
    failed.add(key)
    return False


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_same_answers_as_xgrammar(kind: str, name: str) -> None:
    """Every text is an answer, and what walks give is one of xgrammar's; the same lists are made once."""
    at, made = setting(name), lists(name)
    rng, lifted = random.Random(f"{kind}{name}"), 0
    for _ in range(max(20, SAMPLES // 100)):
        spec, before, after, texts = constraint(kind, texts_of(rng), rng)
        if (compiled := made.get(kind, spec)) is None:
            continue
        lifted += 1
        assert made.get(kind, spec) is compiled
        own = by_xgrammar(at, kind, spec)
        for text in texts:
            whole = before + text + after
            assert spells(at, Composite(*compiled), whole.encode()), (spec, whole)
            matcher = xgrammar.GrammarMatcher(own, terminate_without_stop_token=True)
            assert matcher.accept_string(whole), (spec, whole)
            assert matcher.is_terminated()
        for seed in range(3):
            text = walk(at, Composite(*compiled), seed)
            if text is not None:
                allowed = {BLANKS.sub("", before + one + after) for one in texts}
                assert BLANKS.sub("", text.decode()) in allowed
    assert lifted > 5


def walk(at: Any, composite: Composite, seed: int) -> bytes | None:
    rng, tokens, row = random.Random(seed), list[int](), np.zeros(at.vocabulary.model_words, np.int32)
    for _ in range(80):
        composite.fill_bitmask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: at.vocabulary.size])
        full = allowed[at.full[allowed]]
        token = int(rng.choice(full if full.size else allowed))
        assert composite.accept(token)
        if token == at.stop:
            return bytes(at.text_of(tokens))
        tokens.append(token)
    return None


LISTED = " | ".join(f'"a{i}"' for i in range(9))
LEFT = {
    "after a space": f'root ::= "see " x\nx ::= {LISTED}',
    "before itself": f'root ::= x{{1, 3}} "."\nx ::= {LISTED}',
    "in a rule that holds itself": f'root ::= "(" y\ny ::= x y | "."\nx ::= {LISTED}',
    "after anything": f"root ::= [a-z ]* x\nx ::= {LISTED}",
    "brackets in a text that looks like none": f'root ::= "{"([" * 200}" Token(5) | {LISTED}',
}


@pytest.mark.parametrize("why", LEFT)
def test_what_stays_with_xgrammar(why: str) -> None:
    assert lists("tiny").get(EBNF, LEFT[why]) is None


def test_a_line_of_brackets_takes_no_square() -> None:
    """Else this would take hours, and nothing else would run."""
    brackets = 'root ::= ("' + "([" * 500_000 + f'" Token(5) | {LISTED})'
    assert long_alternations(brackets, 1, 99) == (brackets, [])


def test_special_tokens_stay_with_xgrammar() -> None:
    """An answer would leave them out."""
    tokenizer = copy.deepcopy(setting("tiny").tokenizer)
    tokenizer.add_tokens([AddedToken("<f>", special=True)], special_tokens=True)
    at = setting("tiny")
    made = LongAlternations(lambda: at.vocabulary, tokenizer, 1, {}, logging.getLogger(__name__))
    assert made.get(EBNF, 'root ::= "<f>a" | "b" | "c"') is None
    assert made.get(EBNF, 'root ::= "<fa" | "b" | "c"') is not None


def test_nul_stays_with_xgrammar_and_stands_beside_no_set() -> None:
    """xgrammar's print ends a text there, and another language would be served."""
    made, schema = lists("tiny"), {"enum": ["red", "green", "blue"]}
    tag = {"type": "tag", "begin": "a\0b", "content": {"type": "json_schema", "json_schema": schema}, "end": "</t>"}
    assert made.get(TAG, json.dumps({"type": "structural_tag", "format": tag})) is None
    assert made.get(TAG, json.dumps({"type": "structural_tag", "format": tag | {"begin": r"a\0b"}})) is not None
    for text in (r"a\u0000b", r"a\x00b", "a\0b"):
        assert made.get(EBNF, f'root ::= "{text}" x\nx ::= "red" | "green" | "blue"') is None
        with pytest.raises(ItemSetError, match=r"ebnf.* holds the character NUL .*: leave it out"):
            Marker(lambda _: 3).mark(EBNF, f'root ::= "{text}" ItemSet("films")')


def test_lists_in_tags_of_the_older_form() -> None:
    at, schema = setting("tiny"), {"enum": ["red", "green", "blue"]}
    tag = {"structures": [{"begin": "<x>", "schema": schema, "end": "</x>"}], "triggers": ["<x>"]}
    compiled = lists("tiny").get(TAG, json.dumps({"type": "structural_tag"} | tag))
    assert compiled is not None
    assert spells(at, Composite(*compiled), b'<x>"green"</x>')


def test_what_triggers_stands_before_a_list() -> None:
    """What tags trigger is printed on lines of its own."""
    at = setting("llama")
    grammar = 'root ::= x | t\nt ::= TagDispatch(("<a>", y))\ny ::= x "</a>"\nx ::= "foo" | "bar" | "baz"'
    compiled = lists("llama").get(EBNF, grammar)
    assert compiled is not None
    assert spells(at, Composite(*compiled), b"<a>foo</a>")
    assert not spells(at, Composite(*compiled), b"<a> foo</a>")


def test_many_at_once_where_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_engine, "_KEPT", 1_000)
    made, rng = lists("tiny"), random.Random(0)
    specs = [json.dumps({"enum": texts_of(rng)}) for _ in range(4)] * 8
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda spec: made.get(JSON, spec), specs))
    assert sum(made._costs.values()) <= 1_000
    assert made._costs.keys() <= made._made.keys()


def test_threads_have_short_turns_while_any_constraint_is_compiled():
    usual = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < usual
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual
