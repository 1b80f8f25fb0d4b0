"""Items inside answers on the real SGLang: JSON fields, tags, grammars, slates; offline on both paths, and by HTTP."""

from __future__ import annotations

import json

import cell_asking
import client_checks
import demo_checks
import pages
import pytest
from inside_cases import CHAT, SLATE, TAG, TITLES, check_refused_beside_slates
from inside_tests import *  # noqa: F403 - its tests, with the engine and the server of this module
from models import tiny_tokenizer
from sglang_engines import NGRAM, sampling_params

COMPACT = {"constrained_json_disable_any_whitespace": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return cell_asking.options(tmp_path_factory.mktemp("inside"), tiny_tokenizer())


@pytest.fixture
def engine(engines, tiny_model, files, path):
    given = cell_asking.in_process(files)
    return engines(tiny_model, grammar_backend="static", **given, item_set_path=path, **COMPACT)


@pytest.fixture
def drafting(engines, tiny_model, files, path):
    return engines(tiny_model, grammar_backend="static", **files, item_set_path=path, **COMPACT, **NGRAM)


@pytest.fixture
def saved(engines, tiny_model, path):
    def ask(words, forced):
        options = {"forced_drafts": forced, "inline_enum_size": 5, "item_set_path": path}
        drafts = NGRAM | {"speculative_num_draft_tokens": 6}
        engine = engines(tiny_model, grammar_backend="static", **options, **COMPACT, **drafts)
        answers = engine.ask([f"p {i}" for i in range(len(words))], words)
        steps = sum(answer.said["spec_verify_ct"] for answer in answers)
        return answers, sum(len(answer.tokens) - 1 for answer in answers) - steps

    return ask


@pytest.fixture
def own_form():
    """In the `sampling_params` of `/generate`."""
    return lambda words: ("/generate", {"text": "p", "sampling_params": sampling_params(words)})


@pytest.mark.parametrize("name", cell_asking.asks("sglang", offline=True))
def test_every_cell_of_the_docs_offline(engine, name):
    cell = cell_asking.asks("sglang", offline=True)[name].cell
    cell.check(engine.call(cell_asking.offline_sglang, cell.words))


@pytest.fixture
def server(servers, tiny_model, files):
    flags = ("--grammar-backend", "static", "--constrained-json-disable-any-whitespace", *cell_asking.flags(files))
    flags += ("--tool-call-parser", "pythonic")  # with which tools that are required are a JSON schema
    return servers(tiny_model, arguments=flags, context_length=1024)  # as much as the demo's questions need


@pytest.mark.parametrize("name", cell_asking.asks("sglang"))
def test_every_cell_of_the_docs_over_http(server, name):
    cell_asking.check(server, "sglang", name)


def test_the_demos_questions(server, monkeypatch):
    demo_checks.check(server, monkeypatch)


def test_the_requests_of_the_pages(server):
    ((path, body),) = pages.requests(30000)
    status, answer = server.post(path, json.loads(body))
    assert (status, len(answer["meta_info"]["beam_results"])) == (200, 10), answer


def test_clients_and_the_requests_that_serve_prints(server, tiny_model, tmp_path, capsys):
    client_checks.check(server)
    client_checks.check_printed(server, tmp_path)
    client_checks.check_bench(server, tiny_model, tmp_path, capsys)
    client_checks.check_bench_of_generate(server, tiny_model, tmp_path)


def test_langchain_and_instructor(server):
    client_checks.check_frameworks(server)


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
