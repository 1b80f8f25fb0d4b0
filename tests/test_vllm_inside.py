"""Items inside answers on the real vLLM: JSON fields, tags, grammars, slates; offline on both runners, and by HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cell_asking
import demo_checks
import pytest
from inside_cases import ALONE, BAD, BAD_SLATES, CASES, CHAT, SCHEMAS, SLATE, TITLES, check_refused_beside_slates
from models import tiny_tokenizer
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

COMPACT = {"backend": "static", "disable_any_whitespace": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return cell_asking.options(tmp_path_factory.mktemp("inside"), tiny_tokenizer())


@pytest.fixture
def engine(runner, engines, tiny_model, options):
    return engines(runner, tiny_model, structured_outputs_config=COMPACT, additional_config=options)


def asking(name: str, **more: Any) -> SamplingParams:
    kind, constraint, _ = CASES[name]
    given: dict[str, Any] = {"extra_args": {"slate": constraint}}
    if kind != "slate":
        given = {"structured_outputs": StructuredOutputsParams(**{kind: constraint})}
    return SamplingParams(**{"max_tokens": 150, "temperature": 1} | given | more)


def check(names: list[str], outputs: list[Any]) -> None:
    ended = 0
    for name, output in zip(names, outputs, strict=True):
        for one in output.outputs:
            if one.finish_reason == "stop":
                CASES[name][2](one.text, one.items)
                ended += 1
    assert ended > len(names) * 2 / 3


def test_answers_hold_items(engine):
    names = [name for name in CASES for _ in range(4)]
    check(names, engine.generate([f"p {i}" for i in range(len(names))], [asking(name) for name in names]))


@pytest.mark.parametrize("name", cell_asking.asks("vllm", offline=True))
def test_every_cell_of_the_docs_offline(engine, name):
    cell = cell_asking.asks("vllm", offline=True)[name].cell
    cell.check(engine.call(cell_asking.offline_vllm, cell.words))


def test_beside_sets_and_other_grammars(engine):
    """In one batch, on the device path as well: each as if it were alone."""
    plain = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-c]{4}"))
    item = SamplingParams(max_tokens=40, temperature=1, extra_args={"item_set": "titles"})
    params = [asking("object"), plain, item, asking("slate", n=3)] * 4
    outputs = engine.generate([f"q {i}" for i in range(16)], params)
    check(["object", "slate"] * 4, [output for i, output in enumerate(outputs) if i % 4 in (0, 3)])
    for output in outputs[1::4]:
        assert set(output.outputs[0].text) <= set("abc")
        assert not hasattr(output.outputs[0], "items")
    for output in outputs[2::4]:
        assert output.outputs[0].text in TITLES
        assert output.outputs[0].item["key"].startswith("title")


def test_with_speculation_the_answers_are_the_same(runner, engines, tiny_model, options, engine):
    """Drafts are judged across the borders of items, and rolled back there."""
    arguments = {"structured_outputs_config": COMPACT, "additional_config": options}
    drafting = engines(runner, tiny_model, speculative_config=NGRAM, **arguments)
    names = [name for name in CASES for _ in range(2)]
    prompts = [f"[{', '.join(TITLES[:4])}] {i}" for i in range(len(names))]
    params = [asking(name, temperature=0) for name in names]
    expected, drafted = (one.generate(prompts, params) for one in (engine, drafting))
    for name, one, other in zip(names, expected, drafted, strict=True):
        assert one.outputs[0].text == other.outputs[0].text
        assert one.outputs[0].items == other.outputs[0].items, name


def test_a_stop_token_that_is_the_separator_is_refused(engine):
    (newline,) = [token for token, text in enumerate(token_texts()) if text == "\n"]
    with pytest.raises(VLLMValidationError, match="begins as the slate's separator does"):
        engine.generate(["p"], asking("slate alone", stop_token_ids=[newline]))


@pytest.mark.parametrize(
    ("prompt", "sampled", "sentence"),
    [
        ("p", {"max_tokens": 34}, "a slate of so many items has at least 35 tokens, but max_tokens=34: raise"),
        (
            "p",
            {"min_tokens": 36, "max_tokens": 50},
            "min_tokens=36 could forbid the end of the slate, which may have 35 tokens",
        ),
        ([5] * 230, {"max_tokens": None}, "at least 35 tokens, but max_model_len=256 leaves 26 after a prompt of 230"),
    ],
)
def test_slates_without_room_are_refused(engine, prompt, sampled, sentence):
    prompt = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
    asked = {"item_set": "titles", "n": 18}
    with pytest.raises(VLLMValidationError, match=sentence):
        engine.generate([prompt], SamplingParams(**sampled, extra_args={"slate": asked}))


def test_after_the_end_come_stop_tokens_alone(engine):
    names, tokenizer = ["object", "slate", "tag", "slate alone"], tiny_tokenizer()
    params = [asking(name, ignore_eos=True, max_tokens=200) for name in names]
    for name, output in zip(names, engine.generate(["p"] * 4, params), strict=True):
        (one,) = output.outputs
        assert one.finish_reason == "length"
        end = one.token_ids.index(tokenizer.eos_token_id)
        assert set(one.token_ids[end:]) == {tokenizer.eos_token_id}
        CASES[name][2](tokenizer.decode(one.token_ids[:end]), one.items)


def token_texts() -> list[str]:
    tokenizer = tiny_tokenizer()
    return [tokenizer.decode([token]) for token in range(len(tokenizer))]


@pytest.mark.parametrize("sentence", BAD)
def test_what_would_not_hold_is_refused(engine, sentence):
    structured = StructuredOutputsParams(json=BAD[sentence])
    with pytest.raises(VLLMValidationError, match="parameter=structured_outputs") as raised:
        engine.generate(["p"], SamplingParams(structured_outputs=structured))
    assert sentence in str(raised.value)


def test_without_our_backend_an_item_set_is_no_string(engines, tiny_model):
    with pytest.raises(VLLMValidationError, match="this engine has no item sets"):
        engines("v1", tiny_model).generate(["p"], asking("object"))


@pytest.fixture
def server(servers, tiny_model, options):
    config = "--structured-outputs-config"
    backend = (f"{config}.backend", "static", f"{config}.disable_any_whitespace", "true")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    # As much context as the demo's questions need.
    return servers("v2", tiny_model, arguments=(*backend, *tools, *cell_asking.flags(options)), max_model_len=1024)


@pytest.mark.parametrize("name", cell_asking.asks("vllm"))
def test_every_cell_of_the_docs_over_http(server, name):
    cell_asking.check(server, "vllm", name)


def test_the_demos_questions(server, options, monkeypatch):
    demo_checks.check(server, "vllm", options["item_sets"]["films"], monkeypatch)


ROOMY = {"max_tokens": 150}


def completed(server: Any, **body: Any) -> dict[str, Any]:
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "p", **ROOMY, **body})
    assert status == 200, answer
    return answer["choices"][0]


def test_over_http(server):
    def formatted(name: str) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name]}}

    def ask(name: str) -> dict[str, Any]:
        kind, constraint, _ = CASES[name]
        given = {kind: constraint} if kind == "slate" else {"structured_outputs": {kind: constraint}}
        return completed(server, **given, temperature=1)

    names = [*CASES] * 2
    with ThreadPoolExecutor(16) as pool:
        choices = list(pool.map(ask, names))
        asked = list(pool.map(lambda name: completed(server, response_format=formatted(name)), SCHEMAS))
    for name, choice in zip([*names, *SCHEMAS], [*choices, *asked], strict=True):
        if choice["finish_reason"] == "stop":
            CASES[name][2](choice["text"], choice["items"])
    assert sum(choice["finish_reason"] == "stop" for choice in choices) > len(choices) / 2


def test_items_inside_are_counted(server):
    before = server.figures()
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "p", "n": 2, **ROOMY, "slate": ALONE})
    assert status == 200, answer
    completed(server, slate={"item_set": ["red", "blue"], "n": 2})
    gained = {name: value - before.get(name, 0) for name, value in server.figures().items() if "inside" in name}
    assert {name: count for name, count in gained.items() if count} == {  # other tests have asked for other sets
        'item_set:items_inside_total{item_set="titles"}': 2 * ALONE["n"],
        'item_set:items_inside_total{item_set="inline"}': 2,
    }


def test_tools(server):
    check_refused_beside_slates(server)
    parameters = {"type": "object", "properties": {"films": SLATE}, "required": ["films"]}
    function = {"name": "show", "parameters": parameters}
    named = {"type": "function", "function": {"name": "show"}}
    for choice in (named, "required", "auto"):  # vLLM holds no parameters of tools that are not strict
        loose = CHAT | {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
        status, answer = server.post("/v1/chat/completions", loose)
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert '"strict": true' in answer["error"]["message"]
        assert ("name it in tool_choice" in answer["error"]["message"]) == (choice is not named)
    strict = [{"type": "function", "function": function | {"strict": True}}]
    status, answer = server.post("/v1/chat/completions", CHAT | {"tools": strict, "tool_choice": named})
    assert status == 200, answer
    choice = answer["choices"][0]
    films = [item["text"] for item in choice["items"]]
    assert set(films) <= set(TITLES)
    assert len(set(films)) == len(films)
    for call in choice["message"].get("tool_calls") or ():  # none if a limit has cut it
        assert json.loads(call["function"]["arguments"])["films"] == films


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_over_http(server, stream):
    for sentence, fields in BAD_SLATES.items():
        status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "p", "stream": stream, **fields})
        assert (status, sentence in json.dumps(answer)) == (400, True), answer
        param = "exclude_keys" if "exclude_keys" in fields else "width" if "width" in fields else "slate"
        assert stream or answer["error"]["param"] == param
    for sentence, schema in BAD.items():
        formats = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for body in ({"structured_outputs": {"json": schema}}, {"response_format": formats}):
            given = {"model": "tiny", "prompt": "p", "stream": stream, **body}
            status, answer = server.post("/v1/completions", given)
            assert (status, sentence in json.dumps(answer)) == (400, True), answer
