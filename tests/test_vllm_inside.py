"""Items inside answers on the real vLLM: JSON fields, tags, grammars, slates; offline on both runners, and by HTTP."""

from __future__ import annotations

import json

import cell_asking
import client_checks
import demo_checks
import pages
import pytest
from inside_cases import ALONE, BAD, BAD_SLATES, CHAT, SLATE, TITLES, TOOLS, check_refused_beside_slates
from inside_tests import *  # noqa: F403 - its tests, with the engine and the server of this module
from inside_tests import holding
from models import tiny_tokenizer
from server_tests import complete
from test_vllm_engine import metrics
from vllm.exceptions import VLLMValidationError

from itemset.embedded.placement import TAG
from itemset.embedded.tool_list import tool_list

COMPACT = {"backend": "static", "disable_any_whitespace": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return cell_asking.options(tmp_path_factory.mktemp("inside"), tiny_tokenizer())


@pytest.fixture
def engine(runner, engines, tiny_model, options):
    given = cell_asking.in_process(options)
    return engines(runner, tiny_model, structured_outputs_config=COMPACT, additional_config=given)


@pytest.fixture
def drafting(runner, engines, tiny_model, options):
    given = {"structured_outputs_config": COMPACT, "additional_config": options}
    return engines(runner, tiny_model, speculative_config=NGRAM, **given)


@pytest.fixture
def saved(runner, engines, tiny_model):
    """Drafts must be known before their step begins: without asynchronous scheduling."""
    method = {"v1": "ngram", "v2": "ngram_gpu"}[runner]
    given = {"speculative_config": NGRAM | {"method": method, "num_speculative_tokens": 5}, "async_scheduling": False}

    def ask(words, forced):
        options = {"forced_drafts": forced, "inline_enum_size": 5, "item_set_path": "host"}
        more = {"structured_outputs_config": COMPACT, "additional_config": options, "disable_log_stats": False}
        engine = engines(runner, tiny_model, **given, **more)
        before = engine.call(metrics)["vllm:spec_decode_num_accepted_tokens"]
        answers = engine.ask([f"p {i}" for i in range(len(words))], words)
        return answers, engine.call(metrics)["vllm:spec_decode_num_accepted_tokens"] - before

    return ask


@pytest.fixture
def own_form():
    """In `structured_outputs`."""
    openai = {"model": "tiny", "prompt": "p"}
    return lambda words: ("/v1/completions", openai | ({"structured_outputs": words} if "json" in words else words))


@pytest.mark.parametrize("name", cell_asking.asks("vllm", offline=True))
def test_every_cell_of_the_docs_offline(engine, name):
    cell = cell_asking.asks("vllm", offline=True)[name].cell
    cell.check(engine.call(cell_asking.offline_vllm, cell.words))


def test_without_our_backend_an_item_set_is_no_string(engines, tiny_model):
    with pytest.raises(VLLMValidationError, match="this engine has no item sets"):
        engines("v1", tiny_model).ask(["p"], holding("object"))


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder for the pages of the docs, with one of published sets that the server follows."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "sets").mkdir()
    return folder


@pytest.fixture
def server(servers, tiny_model, options, shop):
    config = "--structured-outputs-config"
    backend = (f"{config}.backend", "static", f"{config}.disable_any_whitespace", "true")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    # As much context as the demo's questions need.
    more = ("--item-set-dir", str(shop / "sets"), "--additional-config", '{"item_set_headroom": 64000000}')
    arguments = (*backend, *tools, *cell_asking.flags(options), *more)
    return servers("v2", tiny_model, arguments=arguments, max_model_len=1024)


@pytest.mark.parametrize("name", cell_asking.asks("vllm"))
def test_every_cell_of_the_docs_over_http(server, name):
    cell_asking.check(server, "vllm", name)


def test_the_demos_questions(server, monkeypatch):
    demo_checks.check(server, monkeypatch)


@pytest.mark.parametrize("page", ["index", *(f"tutorials/{name}" for name in pages.TUTORIALS)])
def test_pages_as_a_reader_follows_them(page, server, shop, tiny_model):
    printed = pages.follow(f"{page}.md", shop, tiny_model, server)
    assert any(printed)


def test_items_inside_and_the_requests_of_the_pages(server, tmp_path):
    asked = pages.requests(8000)
    assert len(asked) >= 4
    for path, body in asked:
        status, answer = server.post(path, json.loads(body) | {"model": server.model_name})
        assert (status, len(answer["choices"]) > 0) == (200, True), answer
    (film, _, _, _, slate) = pages.follow("inside.md", tmp_path, server.model_name, server, client=server.client)
    assert "'set': 'films'" in film
    assert slate.count("'key'") == 5


def test_clients_and_the_requests_that_serve_prints(server, tiny_model, tmp_path, capsys):
    client_checks.check(server)
    client_checks.check_printed(server, tmp_path)
    client_checks.check_bench(server, tiny_model, tmp_path, capsys)


def test_langchain_and_instructor(server):
    client_checks.check_frameworks(server)


def test_items_inside_are_counted(server):
    before = server.figures()
    complete(server, n=2, max_tokens=150, slate=ALONE)
    complete(server, max_tokens=150, slate={"item_set": ["red", "blue"], "n": 2})
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
        assert "name it in tool_choice" not in answer["error"]["message"]  # which would not help
    strict = [{"type": "function", "function": function | {"strict": True}}]
    for chosen in (named, "required"):
        asked = CHAT | {"tools": strict, "tool_choice": chosen, "max_tokens": 600, "parallel_tool_calls": False}
        status, answer = server.post("/v1/chat/completions", asked)
        assert status == 200, answer
        choice = answer["choices"][0]
        films = [item["text"] for item in choice["items"]]
        assert set(films) <= set(TITLES)
        assert len(set(films)) == len(films)
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("show", {"films": films})
        events = server.events("/v1/chat/completions", asked | {"stream": True})
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        assert not any(delta.get("content") for delta in deltas)
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        assert {*json.loads("".join(call.get("arguments") or "" for call in calls))["films"]} <= {*TITLES}


def test_tools_of_every_model_whose_tags_are_known():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers import structural_tag_registry as registry

    tools = [ChatCompletionToolsParam(**tool) for tool in TOOLS]
    models = registry._VLLM_STRUCTURAL_TAG_REGISTRY.keys() | registry.XGRAMMAR_BUILTIN_STRUCTURAL_TAG_MODELS
    assert len(models) > 15
    for model in models - {"harmony"}:  # gpt-oss, whose calls are framed in many ways; registered when it is used
        for choice in ("required", "auto"):
            tag = registry.get_model_structural_tag(model, tools, choice, reasoning=False)
            listed = tool_list(TAG, json.dumps(tag.model_dump()), 100)
            assert listed is not None, model
            assert listed.size == len(tools), model


def test_a_bad_slate_names_its_field(server):
    for fields in BAD_SLATES.values():
        status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "p", **fields})
        param = "exclude_keys" if "exclude_keys" in fields else "width" if "width" in fields else "slate"
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("sentence", BAD)
def test_what_would_not_hold_is_a_fault_of_structured_outputs(engine, sentence):
    with pytest.raises(VLLMValidationError, match="parameter=structured_outputs"):
        engine.ask(["p"], {"json": BAD[sentence]})
