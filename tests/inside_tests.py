"""What holds of answers with items inside, of either engine. Test modules import these, and have the fixtures `engine`,
`drafting` (the same one with speculation), `saved` (answers of one that speculates, and how many drafts it accepted),
`server`, and `own_form`: of words for an engine, the path and the fields of their own form over HTTP."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from demo_checks import TITLE_OF
from engine_words import Answer
from inside_cases import (
    ALONE,
    BAD,
    BAD_SLATES,
    CALLS_TAG,
    CASES,
    CHAT,
    MANY_TOOLS,
    SCHEMAS,
    TITLES,
    TOOLS,
    calls_schema,
)
from models import tiny_tokenizer
from server_tests import check_refused


def holding(name: str, **more: Any) -> dict[str, Any]:
    kind, constraint, _ = CASES[name]
    return {kind: constraint, "max_tokens": 150, "temperature": 1} | more


def check(names: list[str], answers: list[Answer]) -> None:
    ended = 0
    for name, answer in zip(names, answers, strict=True):
        if answer.finish == "stop":
            CASES[name][2](answer.text, answer.said["items"])
            ended += 1
    assert ended > len(names) * 2 / 3


def test_answers_hold_items(engine):
    names = [name for name in CASES for _ in range(4)]
    check(names, engine.ask([f"p {i}" for i in range(len(names))], [holding(name) for name in names]))


def test_beside_sets_and_other_grammars(engine):
    """In one batch, on the device path as well: each as if it were alone."""
    item = {"item_set": "titles", "max_tokens": 40, "temperature": 1}
    words = [holding("object"), {"regex": "[a-c]{4}", "max_tokens": 20}, item, holding("slate")] * 4
    *answers, film = engine.ask([f"q {i}" for i in range(17)], [*words, item | {"item_set": "films"}])
    assert [*TITLE_OF.values()][film.said["item"]["key"]] == film.text  # of a list that the engine was given
    check(["object", "slate"] * 4, [answer for i, answer in enumerate(answers) if i % 4 in (0, 3)])
    for answer in answers[1::4]:
        assert set(answer.text) <= set("abc")
        assert "items" not in answer.said
    for answer in answers[2::4]:
        assert answer.text in TITLES
        assert answer.said["item"]["key"].startswith("title")


def test_with_speculation_the_answers_are_the_same(engine, drafting):
    """Drafts are judged across the borders of items, and rolled back there."""
    names = [name for name in CASES for _ in range(2)]
    prompts = [f"[{', '.join(TITLES[:4])}] {i}" for i in range(len(names))]
    words = [holding(name, temperature=0, max_tokens=80) for name in names]
    for name, one, other in zip(names, engine.ask(prompts, words), drafting.ask(prompts, words), strict=True):
        assert one.text == other.text, name
        assert one.said["items"] == other.said["items"], name


def test_what_a_set_forces_inside_an_answer_is_drafted(saved):
    """Titles that stand alone after three words have twelve more. N-grams know them when one is given again at most."""
    rest = "a night that nobody in the town would ever speak about again"
    titles = [f"{who} {what} of {rest}" for who in ("Long", "Short", "Old") for what in ("story", "road", "song")]
    field = {"enum": titles}
    schema = {"type": "object", "properties": {"film": field, "other": field}, "required": ["film", "other"]}
    words = {"json": schema | {"additionalProperties": False}, "max_tokens": 150, "temperature": 0}
    alone = {"choice": titles, "max_tokens": 40, "temperature": 0}
    asked = [words] * 4 + [alone] * 2 + [{"max_tokens": 8, "temperature": 0}]
    plain, some = saved(asked, forced=False)
    answers, more = saved(asked, forced=True)
    assert [answer.text for answer in answers] == [answer.text for answer in plain]
    assert all(set(json.loads(answer.text).values()) <= set(titles) for answer in answers[:4])
    tokens = sum(len(answer.tokens) for answer in answers[:6])
    assert more > max(some, tokens / 2)


def test_after_the_end_come_stop_tokens_alone(engine):
    names, tokenizer = ["object", "slate", "tag", "slate alone"], tiny_tokenizer()
    words = [holding(name, ignore_eos=True, max_tokens=200) for name in names]
    for name, answer in zip(names, engine.ask(["p"] * 4, words), strict=True):
        assert answer.finish == "length"
        end = answer.tokens.index(tokenizer.eos_token_id)
        assert set(answer.tokens[end:]) == {tokenizer.eos_token_id}
        CASES[name][2](tokenizer.decode(answer.tokens[:end]), answer.said["items"])


def test_a_slate_has_no_limit_of_its_own(server):
    """The default of completions, 16 tokens, would cut it."""
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "p", "slate": ALONE | {"n": 12}})
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], len(choice["items"])) == ("stop", 12)


def test_answers_that_are_no_json_name_their_items(engine):
    """A pattern may let in what no JSON string has; such an answer is one of many in the engine's loop."""
    film = {"type": "string", "item_set": "titles"}
    odd = {
        "type": "object",
        "patternProperties": {r"^\\q$": {"type": "boolean"}},
        "minProperties": 1,
        "maxProperties": 1,
    }
    properties = {"m": odd | {"additionalProperties": False}, "film": film}
    schema = {"type": "object", "properties": properties, "required": ["m", "film"], "additionalProperties": False}
    answers = engine.ask(["p"] * 4, [{"json": schema, "max_tokens": 150, "temperature": 1}] * 4)
    ended = [answer for answer in answers if answer.finish == "stop"]
    assert ended
    for answer in ended:
        assert r'"\q"' in answer.text
        (item,) = answer.said["items"]
        assert (item["path"], item["text"] in TITLES) == ("$.film", True)


def test_very_many_texts_become_sets(engine, drafting):
    """In the tokens that the tokenizer gives each of them, where xgrammar would allow any others."""
    tokenizer, texts = tiny_tokenizer(), [f"{title}, Québec {i}" for i in range(40) for title in TITLES[:3]]
    schema = {"type": "object", "properties": {"é1": {"enum": [*texts, None]}}, "required": ["é1"]}
    tag = {"type": "tag", "begin": "<x>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</x>"}
    alternatives = " | ".join(f'"{text}"' for text in texts)
    words: list[dict[str, Any]] = [
        {"json": schema},
        {"structural_tag": json.dumps({"type": "structural_tag", "format": tag})},
        {"grammar": f'root ::= "(" x ")" y\nx ::= {alternatives}\ny ::= "." | "!"'},
        {"regex": f"x({'|'.join(texts)})y"},
    ]
    inside = [r'{\s*"é1"\s*:\s*"?(.*?)"?\s*}', r'<x>{\s*"é1"\s*:\s*"?(.*?)"?\s*}</x>', r"\((.*)\)[.!]", "x(.*)y"]
    asked, found = [one | {"max_tokens": 150, "temperature": 1} for one in words for _ in range(3)], list[str]()
    for served in (engine, drafting):
        for i, answer in enumerate(served.ask([f"p {i}" for i in range(len(asked))], asked)):
            assert "items" not in answer.said
            if answer.finish == "stop":
                text = re.fullmatch(inside[i // 3], answer.text)
                assert text is not None, answer.text
                if text[1] != "null":
                    found.append(text[1])
                    own = tokenizer.encode(text[1], add_special_tokens=False)
                    assert len(own) < len(text[1].encode())
                    assert own in [list(answer.tokens[at : at + len(own)]) for at in range(len(answer.tokens))]
    assert set(found) <= set(texts)
    assert len(found) > len(asked)


def of_calls(calls: list[dict[str, Any]], arguments: str) -> None:
    """Each a tool with its own arguments."""
    for call in calls:
        size, wrapped = MANY_TOOLS[call["name"]]
        given = call[arguments]
        given = json.loads(given) if isinstance(given, str) else given
        assert given.keys() == {size, wrapped}
        assert given[size] in ("small", "large")
        assert given[wrapped] in (True, False)


def test_one_of_hundreds_of_tools(engine, drafting):
    """By its own schema, also where drafts cross the end of its name."""
    kinds = [{"json": calls_schema(1)}, {"structural_tag": json.dumps(CALLS_TAG)}]
    asked = [one | {"max_tokens": 200, "temperature": 0} for one in kinds for _ in range(4)]
    prompts = [f"{list(MANY_TOOLS)[i]} {i}" for i in range(len(asked))]
    ended = 0
    for one, other in zip(engine.ask(prompts, asked), drafting.ask(prompts, asked), strict=True):
        assert one.text == other.text
        if one.finish == "stop":
            ended += 1
            if one.text.startswith("["):
                of_calls(json.loads(one.text), "parameters")
            else:
                of_calls([json.loads(text) for text in re.findall(r"<t>(.*?)</t>", one.text)], "arguments")
    assert ended > len(asked) / 2


@pytest.mark.parametrize("stream", [False, True])
def test_hundreds_of_tools_over_http(server, stream):
    def called(choice: Any) -> list[dict[str, Any]]:
        body = CHAT | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
        if not stream:
            status, answer = server.post("/v1/chat/completions", body)
            assert status == 200, answer
            return [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
        calls: dict[int, dict[str, str]] = {}
        for event in server.events("/v1/chat/completions", body | {"stream": True}):
            for delta in event["choices"][0]["delta"].get("tool_calls") or () if event["choices"] else ():
                call = calls.setdefault(delta["index"], {"name": "", "arguments": ""})
                for key in call:
                    call[key] += delta["function"].get(key) or ""
        return list(calls.values())

    for _ in range(3):
        (call,) = called("required")
        of_calls([call], "arguments")
    (call,) = called({"type": "function", "function": {"name": "send_77"}})
    assert call["name"] == "send_77"
    of_calls([call], "arguments")
    assert f"constraint of {len(TOOLS)} tools has item sets" in server.log()


def test_integers_stand_without_quotes(engine):
    years = [7, 12, 123, 1995, 199, 0, -15]
    one = {"type": "integer", "item_set": years}
    several = {"type": "array", "items": one, "uniqueItems": True, "minItems": 2, "maxItems": 3}
    schema = {"type": "object", "properties": {"year": one, "years": several}, "required": ["year", "years"]}
    for answer in engine.ask([f"p {i}" for i in range(6)], [{"json": schema, "max_tokens": 150, "temperature": 1}] * 6):
        if answer.finish == "stop":
            given = json.loads(answer.text)
            each = [given["year"], *given["years"]]
            assert set(each) <= set(years)
            assert len(set(given["years"])) == len(given["years"])
            paths = ["$.year", *(f"$.years[{i}]" for i in range(len(given["years"])))]
            numbers = [(path, year, years.index(year)) for path, year in zip(paths, each, strict=True)]
            told = [{"path": path, "text": str(year), "key": key, "keys": [key]} for path, year, key in numbers]
            assert answer.said["items"] == told
    (answer,) = engine.ask(["p"], {"json": {"type": ["integer", "null"], "item_set": [1, 2]}})
    assert answer.text in ("1", "2", "null")
    for bad in (["7", "007"], ["1", "02"], ["-"], ["1-2"], ["x"], ["1.5"], ["0", "0123"], ["-012"]):
        with pytest.raises(engine.refusal, match=r"\$: the item '.*' is no integer"):
            engine.ask(["p"], {"json": {"type": "integer", "item_set": bad}})


@pytest.mark.parametrize("sentence", BAD)
def test_what_would_not_hold_is_refused(engine, sentence):
    with pytest.raises(engine.refusal, match=r"parameter=structured_outputs|[Ii]tem|constraint|exclude_keys") as raised:
        engine.ask(["p"], {"json": BAD[sentence]})
    assert sentence in str(raised.value)


def formatted(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def test_schemas_and_slates_over_http(server):
    def ask(name: str) -> dict[str, Any]:
        words = formatted(SCHEMAS[name]) if name in SCHEMAS else {"slate": ALONE}
        status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "p", "max_tokens": 150, **words})
        assert status == 200, answer
        return answer["choices"][0]

    with ThreadPoolExecutor(16) as pool:
        choices = list(pool.map(ask, names := [*SCHEMAS, "slate alone"]))
    for name, choice in zip(names, choices, strict=True):
        if choice["finish_reason"] == "stop":
            CASES[name][2](choice["text"], choice["items"])
    assert sum(choice["finish_reason"] == "stop" for choice in choices) > len(choices) / 2


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_over_http(server, own_form, stream):
    asked = [(sentence, fields, fields) for sentence, fields in BAD_SLATES.items()]
    asked += [(sentence, formatted(schema), {"json": schema}) for sentence, schema in BAD.items()]
    for sentence, fields, words in asked:
        path, body = own_form(words)
        check_refused(server, "/v1/completions", {"model": "tiny", "prompt": "p", "stream": stream} | fields, sentence)
        check_refused(server, path, body | {"stream": stream}, sentence)
