"""Items inside answers on the real SGLang: JSON fields, tags, grammars, slates; offline on both paths, and by HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cell_asking
import demo_checks
import pytest
from inside_cases import BAD, BAD_SLATES, CASES, CHAT, SCHEMAS, SLATE, TAG, TITLES, check_refused_beside_slates
from models import tiny_tokenizer
from sglang_engines import NGRAM

WORDS = {"json": "json_schema", "structural_tag": "structural_tag", "grammar": "ebnf"}
COMPACT = {"constrained_json_disable_any_whitespace": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return cell_asking.options(tmp_path_factory.mktemp("inside"), tiny_tokenizer())


@pytest.fixture
def engine(engines, tiny_model, files, path):
    return engines(tiny_model, grammar_backend="static", **files, item_set_path=path, **COMPACT)


def asking(name: str, **more: Any) -> dict[str, Any]:
    kind, constraint, _ = CASES[name]
    text = constraint if isinstance(constraint, str) else json.dumps(constraint)
    given = {"slate": constraint} if kind == "slate" else {WORDS[kind]: text}
    return {"max_new_tokens": 150, "temperature": 1, **given, **more}


def check(names: list[str], outputs: list[Any]) -> None:
    ended = 0
    for name, output in zip(names, outputs, strict=True):
        if output["meta_info"]["finish_reason"]["type"] == "stop":
            CASES[name][2](output["text"], output["meta_info"]["items"])
            ended += 1
    assert ended > len(names) * 2 / 3


def test_answers_hold_items(engine):
    names = [name for name in CASES for _ in range(4)]
    check(names, engine.generate([f"p {i}" for i in range(len(names))], [asking(name) for name in names]))


@pytest.mark.parametrize("name", cell_asking.asks("sglang", offline=True))
def test_every_cell_of_the_docs_offline(engine, name):
    cell = cell_asking.asks("sglang", offline=True)[name].cell
    cell.check(engine.call(cell_asking.offline_sglang, cell.words))


def test_beside_sets_and_other_grammars(engine):
    plain = {"max_new_tokens": 20, "regex": "[a-c]{4}"}
    item = {"max_new_tokens": 40, "temperature": 1, "item_set": "titles"}
    params = [asking("object"), plain, item, asking("slate")] * 4
    outputs = engine.generate([f"q {i}" for i in range(16)], params)
    check(["object", "slate"] * 4, [output for i, output in enumerate(outputs) if i % 4 in (0, 3)])
    for output in outputs[1::4]:
        assert set(output["text"]) <= set("abc")
        assert "items" not in output["meta_info"]
    for output in outputs[2::4]:
        assert output["text"] in TITLES


@pytest.mark.parametrize(
    ("sampled", "sentence"),
    [
        ({"max_new_tokens": 34}, "a slate of so many items has at least 35 tokens, but max_new_tokens=34: raise"),
        ({"min_new_tokens": 36}, "min_new_tokens=36 could forbid the end of the slate, which may have 35 tokens"),
    ],
)
def test_slates_without_room_are_refused(engine, sampled, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine.generate("p", {"slate": {"item_set": "titles", "n": 18}, **sampled})


def test_after_the_end_come_stop_tokens_alone(engine):
    names, tokenizer = ["object", "slate", "tag", "slate alone"], tiny_tokenizer()
    params = [asking(name, ignore_eos=True, max_new_tokens=200) for name in names]
    for name, one in zip(names, engine.generate(["p"] * 4, params), strict=True):
        assert one["meta_info"]["finish_reason"]["type"] == "length"
        end = one["output_ids"].index(tokenizer.eos_token_id)
        assert set(one["output_ids"][end:]) == {tokenizer.eos_token_id}
        CASES[name][2](tokenizer.decode(one["output_ids"][:end]), one["meta_info"]["items"])


@pytest.mark.parametrize("sentence", BAD)
def test_what_would_not_hold_is_refused(engine, sentence):
    with pytest.raises(ValueError, match=r"[Ii]tem|constraint|exclude_keys") as raised:
        engine.generate("p", {"json_schema": json.dumps(BAD[sentence])})
    assert sentence in str(raised.value)


def test_with_speculation_the_answers_are_the_same(engines, tiny_model, files):
    options = {"grammar_backend": "static", **files, **COMPACT}
    plain, drafting = engines(tiny_model, **options), engines(tiny_model, **options, **NGRAM)
    names = [name for name in CASES for _ in range(2)]
    prompts = [f"[{', '.join(TITLES[:4])}] {i}" for i in range(len(names))]
    params = [asking(name, temperature=0, max_new_tokens=80) for name in names]
    expected, drafted = (one.generate(prompts, params) for one in (plain, drafting))
    for name, one, other in zip(names, expected, drafted, strict=True):
        assert one["text"] == other["text"], name
        assert one["meta_info"]["items"] == other["meta_info"]["items"]


@pytest.fixture
def server(servers, tiny_model, files):
    flags = ("--grammar-backend", "static", "--constrained-json-disable-any-whitespace", *cell_asking.flags(files))
    return servers(tiny_model, arguments=flags, context_length=1024)  # as much as the demo's questions need


@pytest.mark.parametrize("name", cell_asking.asks("sglang"))
def test_every_cell_of_the_docs_over_http(server, name):
    cell_asking.check(server, "sglang", name)


def test_the_demos_questions(server, files, monkeypatch):
    demo_checks.check(server, "sglang", files["item_sets"]["films"], monkeypatch)


def test_over_http(server):
    def ask(name: str) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": "p", "max_tokens": 150}
        if name in SCHEMAS:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name]}}
        else:
            body[CASES[name][0]] = CASES[name][1]
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]

    with ThreadPoolExecutor(16) as pool:
        choices = list(pool.map(ask, names := [*SCHEMAS, "slate alone"]))
    for name, choice in zip(names, choices, strict=True):
        if choice["finish_reason"] == "stop":
            CASES[name][2](choice["text"], choice["items"])
    assert sum(choice["finish_reason"] == "stop" for choice in choices) > len(choices) / 2


def test_tools(server):
    check_refused_beside_slates(server)
    status, answer = server.post("/v1/chat/completions", CHAT | {"response_format": TAG, "use_beam_search": True})
    assert (status, "a beam search takes no item_set inside a grammar" in str(answer)) == (400, True), answer
    parameters = {"type": "object", "properties": {"films": SLATE}, "required": ["films"]}
    tool = {"type": "function", "function": {"name": "show", "parameters": parameters}}
    named = {"type": "function", "function": {"name": "show"}}
    status, answer = server.post("/v1/chat/completions", CHAT | {"tools": [tool], "tool_choice": named})
    assert status == 200, answer
    items = answer["choices"][0]["items"]
    films = [(item.get("path", "").rpartition("[")[0], item["text"]) for item in items]  # of each call its own slate
    assert {text for _, text in films} <= set(TITLES)
    assert len(set(films)) == len(films)


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_over_http(server, stream):
    for sentence, fields in BAD_SLATES.items():
        body = {"model": "tiny", "prompt": "p", "stream": stream, **fields}
        status, answer = server.post("/v1/completions", body)
        assert (status, sentence in json.dumps(answer)) == (400, True), answer
        body = {"text": "p", "stream": stream, "sampling_params": {**fields}}
        status, answer = server.post("/generate", body)
        assert (status, sentence in json.dumps(answer)) == (400, True), answer
    for sentence, schema in BAD.items():
        formats = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": "tiny", "prompt": "p", "stream": stream, "response_format": formats}
        status, answer = server.post("/v1/completions", body)
        assert (status, sentence in json.dumps(answer)) == (400, True), answer
        body = {"text": "p", "stream": stream, "sampling_params": {"json_schema": json.dumps(schema)}}
        status, answer = server.post("/generate", body)
        assert (status, sentence in json.dumps(answer)) == (400, True), answer
