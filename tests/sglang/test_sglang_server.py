"""SGLang's real HTTP server with our flags: what a client asks for, what it gets, and what is refused."""

from __future__ import annotations

import http.client
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lost_words
import pytest
import real_tokenizers
import zstandard
from engine_tests import OTHERS
from request_fields import BAD_SELECTIONS
from server_tests import *  # noqa: F403 - its tests, with the server of this module
from server_tests import (
    COLOURS,
    MESSAGES,
    STATED,
    Dialect,
    audit_folder,
    audit_lines,
    check_everywhere,
    check_refused,
    complete,
    flags_with_a_uri,
    item_of,
    lives,
    text_of,
)
from servers import wait_for
from sglang_engines import sampling_params
from sglang_servers import start_expecting_failure
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

import itemset

IN_A_TAG = {"response_format": {"type": "structural_tag", "format": {"type": "item_set", "item_set": "films"}}}


@pytest.fixture(scope="module")
def server(servers, tiny_model, named_sets):
    tight = ("--constrained-json-disable-any-whitespace", "--enable-metrics")
    with flags_with_a_uri(named_sets) as flags:
        yield servers(
            tiny_model,
            arguments=("--grammar-backend", "static", *tight, *flags),
            env={
                "SGLANG_ENABLE_REQUEST_DECOMPRESSION": "1",
                "SGLANG_STATIC": json.dumps({"item_set_audit_log": str(audit_folder(named_sets))}),
            },
        )


@pytest.fixture
def any_server(server):
    return server


@pytest.fixture(scope="module")
def dialect():
    named = {"custom_params": {"item_set": "one"}}
    return Dialect(
        choice=lambda texts: {"choice": texts},
        others=[
            *((sampling_params(words), holds) for words, holds in OTHERS if words.keys() - {"structural_tag"}),
            ({"structured_outputs": {"choice": COLOURS}}, lambda text: text in COLOURS),
            (STATED, lambda text: text in ('{"n": 1}', '{"n": 2}')),  # the one way to space it: xgrammar has the flag
        ],
        endpoints={"/generate": {"text": "p"}, "/v1/score": {"model": "tiny", "query": "p"}},
        deaf=(
            ("/v1/messages", "/v1/embeddings", "/v1/score", "/classify", "/api/generate", "/invocations"),
            "/generate",
        ),
        bases=lost_words.SGLANGS,
        applies=lost_words.SGLANG_APPLIES,
        tools=(named,),
        start=start_expecting_failure,
        # Its chat request's validators expect an object, with any grammar backend.
        own_faults=frozenset(
            (path, body)
            for path in ("/v1/chat/completions", "/invocations")
            for body in (b"null", b"[]", b"[[]]", b'"item_set"', b"7", b"[null, {}]")
        ),
    )


MISTYPED = [
    ({"sampling_params": {"top_k": [1]}}, "SGLang cannot read sampling_params.top_k (invalid type: sequence, expected"),
    ({"sampling_params": {"min_p": {"a": 1}}}, "SGLang cannot read sampling_params.min_p ("),
    ({"sampling_params": {"stop": [[]]}}, "SGLang cannot read sampling_params.stop ("),
    ({"sampling_params": [{"n": 1}, {"sampling_seed": "7"}]}, "SGLang cannot read sampling_params.sampling_seed ("),
    ({"sampling_params": {"custom_params": {"item_set": "one"}, "regex": 5}}, "cannot read sampling_params.regex ("),
    ({"stream": "yes"}, "SGLang cannot read stream ("),
    ({"return_logprob": 2}, "SGLang cannot read return_logprob ("),
]


@pytest.mark.parametrize(("fields", "message"), MISTYPED)
def test_a_field_of_another_type_is_named(server, fields, message):
    """SGLang's own refusal says what it has expected, and not where."""
    status, answer = server.post("/generate", {"text": "p", "item_set": "one"} | fields)
    assert status == 400
    assert message in str(answer)
    assert "correct it, or omit it" in str(answer)


def test_a_body_of_no_declared_type_loses_nothing(server, named_sets):
    body = json.dumps({"text": "p", "item_set": "one"})
    request = http.client.HTTPConnection(server.url.removeprefix("http://"))
    request.request("POST", "/generate", body)
    response = request.getresponse()
    answer = json.loads(response.read())
    assert response.status in (400, 422) or item_of(answer) in named_sets["one"].items


def test_answers_go_on_after_a_pause(server, named_sets):
    """Which takes all requests out of their batch, and lists with them."""
    with ThreadPoolExecutor() as clients:
        answers = [clients.submit(complete, server, item_set="large", temperature=1) for _ in range(8)]
        ranked = clients.submit(complete, server, item_set="large", use_beam_search=True, n=4)
        paused = server.post("/pause_generation", {"mode": "retract"})[0]
        assert (paused, server.post("/continue_generation", {})[0]) == (200, 200)
        items = [item_of(answer.result()) for answer in (*answers, ranked)]
    assert set(items) <= named_sets["large"].items


def test_a_compressed_body_loses_nothing(server, named_sets):
    body = zstandard.compress(json.dumps({"text": "p", "item_set": "one"}).encode())
    headers = {"Content-Type": "application/json", "x-body-compressed": "zstd"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/generate", body, headers)) as response:
        assert item_of(json.load(response)) in named_sets["one"].items


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"item_set": "ragged", "custom_params": {"item_set": "one"}}, "exclude each other"),
        ({"item_set": "ragged", "choice": ["a"]}, "exclude each other"),
        ({"item_set": "ragged", "regex": "a"}, "exclude each other"),
        ({"choices": ["a"]}, "there is no field choices: send the texts as choice"),
        ({"choise": ["a"]}, "there is no field choise: send the texts as choice"),
        ({"custom_params": {"item_sets": "one"}}, "there is no field item_sets in custom_params: name the item set"),
        ({"custom_params": {"choices": ["a"]}}, "there is no field choices in custom_params: send the texts as choice"),
        ({"vllm_xargs": {"item_set": "one"}}, "there is no field item_set in vllm_xargs"),
        ({"extra_body": {"choice": ["a"]}}, "there is no field choice in extra_body"),
        ({"structured_outputs": {"item_set": "one"}}, "there is no field item_set in structured_outputs: name"),
        ({"guided_choice": ["a"], "choice": ["a"]}, "guided_choice is the older word for choice: give one of them"),
        (
            {"structured_outputs": {"choice": ["a"]}, "choice": ["b"]},
            "choice is given twice, also in structured_outputs",
        ),
        ({"structured_outputs": {"regex": "[0-9]"}}, "of structured_outputs SGLang knows choice alone: send item_set"),
        ({"item_set": "ragged", "beam_width": 5}, "beam_width belongs into the sampling_params of /generate"),
        ({"custom_params": {"item_set_wire": "AAAA"}}, "item_set_wire is not for requests"),
        *(
            ({"item_set": "one", "response_format": stated}, "response_format must be an object, not")
            for stated in ([], 7, "json_object")
        ),
        (
            {"item_set": "ragged", "min_tokens": 2},
            "min_new_tokens=2 forbids the shortest item of the item set 'ragged'",
        ),
    ],
)
def test_a_bad_request_in_sglangs_words_is_http_400(server, named_sets, body, message):
    check_everywhere(server, body, message)
    lives(server, named_sets)


@pytest.mark.parametrize(("body", "message"), BAD_SELECTIONS)
def test_a_bad_selection_on_sglangs_own_endpoint(server, body, message):
    """In a stream too; beside the fields, in `sampling_params`, and in their `custom_params`."""
    for stream in ({}, {"stream": True}):
        for fields in (body, {"sampling_params": body}, {"sampling_params": {"custom_params": body}}):
            check_refused(server, "/generate", {"text": "p", **fields, **stream}, message.partition(":")[0])


LISTED = {"beam_width": 3, "item_set": "ragged", "max_new_tokens": 20}
DRAWN = {"draws": 2, "item_set": "ragged"}
ODD_PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({}, "need a prompt: give text, or input_ids"),
    ({"text": []}, "a prompt: give text, or input_ids"),
    ({"input_ids": [[]]}, "a prompt: give text, or input_ids"),
    ({"input_ids": [[7], []]}, "a prompt: give text, or input_ids"),
    ({"text": [], "lora_path": []}, "a prompt: give text, or input_ids"),
    ({"input_embeds": [[0.5] * 64]}, "need a prompt: give text, or input_ids"),
    ({"text": ["p", "q", "r"], "lora_path": ["a"]}, "lora_path is a list of 1, and there are 3 prompts"),
    ({"text": "p", "lora_path": ["a"]}, "lora_path of one prompt is no list"),
    ({"text": "p", "return_hidden_states": True}, "would ignore return_hidden_states: omit it"),
    ({"text": "p", "session_params": {"id": "a"}}, "would ignore session_params: omit it"),
    ({"text": "p", "session_params": {"a": [1]}}, "session_params must be an object of texts, numbers and bools"),
    ({"text": "p", "session_params": {"a": 1}}, "session_params has no 'a', it has id, rid,"),
    ({"text": "p", "input_ids": [[1]]}, "text and input_ids are of different prompts: give one of them"),
    ({"text": ["p", "q"], "input_ids": [1]}, "text and input_ids are of different prompts: give one of them"),
    ({"text": "p", "image_data": ["a.png"]}, "would ignore image_data: omit it"),
]


@pytest.mark.parametrize(("body", "message"), ODD_PROMPTS)
def test_prompts_that_cannot_be_are_refused(server, named_sets, body, message):
    """Of lists, draws, answers and streams alike, but for what answers have and lists have not."""
    stream = {"stream": True}
    for params, more in ((LISTED, {}), (DRAWN, {}), ({"item_set": "ragged"}, {}), ({"item_set": "ragged"}, stream)):
        listed = params in (LISTED, DRAWN)
        if listed or not ("ignore" in message or "input_embeds" in body):
            check_refused(server, "/generate", body | more | {"sampling_params": params}, message if listed else "")
    lives(server, named_sets)


@pytest.mark.parametrize("params", [LISTED, DRAWN, {"item_set": "ragged"}])
def test_parameters_that_are_not_those_of_the_prompts_are_refused(server, named_sets, params):
    for prompts in (["p", "q"], [[7, 8], [9]], ["p"] * 5):
        body = {"text" if isinstance(prompts[0], str) else "input_ids": prompts}
        for count in (1, 3):
            message = f"sampling_params is a list of {count}, and there are {len(prompts)} prompts: give one for each"
            check_refused(server, "/generate", body | {"sampling_params": [params] * count}, message)
    check_refused(
        server, "/generate", {"text": "p", "sampling_params": [params]}, "sampling_params of one prompt is no"
    )
    check_refused(server, "/generate", {"text": ["p"], "sampling_params": [], "item_set": "ragged"}, "a list of 0")
    lives(server, named_sets)


def test_answers_of_generate_name_their_items_key(server, named_sets):
    ragged = itemset.load(named_sets["ragged"].path)
    asked = {"text": ["p", "q"], "sampling_params": {"n": 2}, "item_set": "ragged"}
    *_, streamed = server.events("/generate", {"text": "p", "item_set": "ragged", "stream": True})
    logged = {}
    for answer in [*server.post("/generate", asked)[1], streamed]:
        assert answer["meta_info"]["item"] == {"key": ragged.lookup([item_of(answer)])[0]}
        logged[answer["meta_info"]["id"]] = [answer["meta_info"]["item"]]
    wait_for(lambda: logged.keys() <= {line["id"] for line in audit_lines(named_sets)})
    found = {line["id"]: line["items"] for line in audit_lines(named_sets)}
    assert {name: found[name] for name in logged} == logged
    before = len(found)
    assert len(server.post("/generate", asked | {"sampling_params": {"n": 3}})[1]) == 6
    wait_for(lambda: len(audit_lines(named_sets)) >= before + 6)
    assert all(line["items"] for line in audit_lines(named_sets)[before:])  # SGLang's own request for a prompt has none


def test_a_streamed_response_with_a_bad_schema_is_http_400(server):
    schema = {"type": "object", "properties": {"film": {"type": "string", "item_set": "no set"}}}
    stated = {"type": "json_schema", "name": "film", "schema": schema}
    given = {"model": "tiny", "input": "p", "stream": True, "text": {"format": stated}}
    check_refused(server, "/v1/responses", given, "no item set is called 'no set'")


def test_parameters_of_a_batch_are_all_for_lists_or_none(server):
    each = [{"item_set": "labels", "beam_width": 4}, {"item_set": "labels", "n": 3}]
    for params in (each, each[::-1]):
        check_refused(server, "/generate", {"text": ["p", "q"], "sampling_params": params}, "are for all prompts of a")
    plain = [{"max_new_tokens": 2}, {"max_new_tokens": 2, "beam_width": 1}]  # which is SGLang's, without any set
    assert server.post("/generate", {"text": ["p", "q"], "sampling_params": plain})[0] == 200


def test_custom_params_may_be_anything_without_a_set(server):
    """As SGLang takes it, whose scheduler reads them for each request."""
    for value in (["a"], "abc", 5, [], ""):
        body = {"text": "p", "sampling_params": {"custom_params": value, "max_new_tokens": 2}}
        assert server.post("/generate", body)[0] == 200
        check_refused(server, "/generate", body | {"item_set": "labels"}, "custom_params must be an object")


def test_custom_params_hold_no_set_where_they_are_not_read(server):
    for path, body in (("/v1/responses", {"model": "tiny", "input": "p"}), ("/generate", {"text": "p"})):
        given = {**body, "custom_params": {"item_set": "one"}}
        check_refused(server, path, given, "there is no field item_set in custom_params")


def test_metrics(server, named_sets):
    before = server.figures()
    complete(server, item_set="labels", n=2)
    complete(server, choice=COLOURS)
    tagged = {"properties": {"x": {"type": "string", "item_set": COLOURS}}, "required": ["x"], "type": "object"}
    complete(server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": tagged}})
    body = {"model": "tiny", "prompt": "p", "max_tokens": 200}
    for options in ({"width": 2}, {"max_passes": 50}):
        ranked = {"item_set": "tagged", "use_beam_search": True, "n": 2, **options}
        assert server.post("/v1/completions", body | ranked)[0] == 200
    assert server.post("/v1/completions", body | {"item_set": "tagged", "draws": 2})[0] == 200
    assert server.post("/v1/completions", body | {"item_set": "lable"})[0] == 400
    assert server.post("/v1/completions", body | {"item_sets": "labels"})[0] == 400
    after = server.figures()
    gained = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    gained.pop("item_set:arena_used_bytes", None)  # of requests before
    gained.pop("item_set:encoded_texts_total", None)  # of lists that were not known
    assert gained.pop('item_set:forced_tokens{item_set="inline"}') > 0
    ways = {name: gained.pop(name) for name in list(gained) if name.startswith("item_set:draw_requests")}
    assert sum(ways.values()) == 1, ways  # the races may leave draws to rounds
    assert gained == {
        'item_set:requests_total{item_set="labels"}': 1,
        'item_set:requests_total{item_set="inline"}': 2,
        'item_set:requests_total{item_set="tagged"}': 3,
        'item_set:refused_requests_total{reason="unknown set"}': 1,
        'item_set:refused_requests_total{reason="wrong type"}': 1,
        'item_set:ranked_lists_total{way="one request"}': 1,
        'item_set:ranked_lists_total{way="max_passes"}': 1,
        'item_set:items_inside_total{item_set="inline"}': 1,
        'item_set:answered_items{item_set="labels"}': 2,
        'item_set:answered_items{item_set="inline"}': 1,
        'item_set:forced_tokens{item_set="labels"}': 2,  # the stop tokens
        'item_set:requests_by_path{path="device"}': 3,
        'item_set:requests_by_path{path="host"}': 1,
    }
    assert after["item_set:illegal_answers_total"] == 0  # of all the requests of this module
    assert after["item_set:arena_bytes"] > after["item_set:arena_used_bytes"] > 0
    for name in ("answered_items", "forced_tokens"):  # from the start on
        assert {f'item_set:{name}{{item_set="{of}"}}' for of in named_sets} <= before.keys()


def test_another_backend_refuses_item_sets(tiny_model, servers):
    server = servers(tiny_model, grammar_backend="xgrammar")
    for path, body in (
        ("/v1/completions", {"model": "tiny", "prompt": "p", "item_set": "films"}),
        ("/generate", {"text": "p", "sampling_params": {"custom_params": {"item_set": "films"}}}),
        ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, **IN_A_TAG}),
    ):
        status, answer = server.post(path, body)
        assert status == 400, answer
        assert "this engine has no item sets: start it with --grammar-backend static" in json.dumps(answer)


@pytest.mark.parametrize("parser", ["deepseek-r1", "qwen3"])
def test_an_item_is_the_content_with_a_reasoning_parser(servers, tiny_model, parser):
    """Of parsers that take all for reasoning, and that do so only after a mark. Nobody asks the model to think."""
    server = servers(tiny_model, arguments=("--grammar-backend", "static"), reasoning_parser=parser)
    chat: dict[str, Any] = {"messages": MESSAGES}
    quiet = chat | {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
    bodies = [("/v1/completions", {"prompt": "p"}), ("/v1/completions", {"prompt": "p", "stream": True})]
    for more in ({"use_beam_search": True, "n": 2}, {"draws": 3}, {} if parser == "qwen3" else {"draws": 1}):
        bodies += [("/v1/completions", {"prompt": "p"} | more), ("/v1/chat/completions", quiet | more)]
        bodies += [("/v1/chat/completions", chat | more)] if more else []
    for texts in (COLOURS, ["one film", "another"], ["yes", "no"]):
        for path, body in bodies:
            given = {"model": "tiny", "max_tokens": 20, "choice": texts} | body
            if "stream" in body:
                said = "".join(event["choices"][0]["text"] for event in server.events(path, given))
                assert said in texts
                continue
            status, answer = server.post(path, given)
            assert status == 200, answer
            for choice in answer["choices"]:
                text = choice["text"] if "text" in choice else choice["message"]["content"]
                assert texts[choice["item"]["key"]] == text, (path, body)
                assert "text" in choice or not choice["message"].get("reasoning_content")


@pytest.fixture(scope="module")
def word_marks(tmp_path_factory):
    """A model with SentencePiece's kind of tokenizer, which marks the beginnings of words, and the end of its thoughts.

    Its `<sep>` is a special token.
    """
    folder = tmp_path_factory.mktemp("word-marks")
    tokenizer = real_tokenizers.tokenizer("llama")
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    tokenizer.add_tokens([AddedToken("<sep>", special=True, normalized=False)])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32_064, bos_token_id=1, eos_token_id=2, max_position_embeddings=512, **small)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder, tokenizer.convert_tokens_to_ids("</think>")


@pytest.mark.parametrize("flags", [(), ("--incremental-streaming-output",)], ids=["whole", "deltas"])
def test_an_item_has_its_text_after_a_thought_and_before_further_ends(servers, word_marks, flags):
    model, mark = word_marks
    server = servers(model, arguments=("--grammar-backend", "static", *flags), reasoning_parser="qwen3")
    thinks = {"messages": MESSAGES, "logit_bias": {str(mark): 100}}  # one token of thought at most
    ignores: dict[str, Any] = {"ignore_eos": True}
    for text in ("Alien", "é千", "<sep><sep>", "👩‍👧 x"):
        for path, words in (("chat/", thinks), ("chat/", thinks | ignores), ("", {"prompt": "p"} | ignores)):
            path, body = f"/v1/{path}completions", {"model": "tiny", "max_tokens": 24, "choice": [text], **words}
            answer = server.post(path, body)[1]["choices"][0]
            assert (text_of(answer), answer["item"]) == (text, {"key": 0})
            streamed = [event["choices"][0] for event in server.events(path, body | {"stream": True})]
            assert "".join(map(text_of, streamed)) == text
    for stop, shown in ((" t", "one"), ("two", "one ")):
        words = {"model": "tiny", "max_tokens": 24, "choice": ["one two three"], "stop": stop, **thinks}
        answer = server.post("/v1/chat/completions", words)[1]["choices"][0]
        assert (text_of(answer), answer["item"]) == (shown, None)
