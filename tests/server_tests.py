"""What holds of the OpenAI server of either engine with our flags. Test modules import these, and say by the fixtures
`server` and `dialect` which server it is and how one speaks to it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import changes
import hostile
import lost_words
import numpy as np
import playground_checks
import pytest
from request_fields import BAD_SELECTIONS
from servers import HttpServer, wait_for
from sets import NamedSet, named_flags
from stores import web_server

import itemset

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
COLOURS = ["red", "green", "blue"]
STATED = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
LONG = "a label of many words, whose encoding takes its time"
MESSAGES = [{"role": "user", "content": "p"}]
OPENAI: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "p"}, "/v1/chat/completions": {"messages": MESSAGES}}
_FEW = {"model": "tiny", "max_tokens": 2}


@dataclass(frozen=True)
class Dialect:
    """How one engine's server differs from the other's.

    choice: an inline set in a body. others: bodies without a registered set, and what holds of their texts.
    endpoints: by path, what an endpoint needs.
    deaf: endpoints that take no item set, and the first that does. own_faults: bodies that the engine itself answers
    with 500. start: starts a server that must fail, and returns its log.
    """

    choice: Callable[[Any], dict[str, Any]]
    others: Sequence[tuple[dict[str, Any], Callable[[str], bool]]]
    endpoints: Mapping[str, dict[str, Any]]
    deaf: tuple[tuple[str, ...], str]
    bases: Mapping[str, dict[str, Any]]
    applies: Mapping[str, list[dict[str, Any]]]
    tools: tuple[dict[str, Any], ...]
    start: Callable[..., str]
    own_faults: frozenset[tuple[str, bytes]] = frozenset()


@contextmanager
def flags_with_a_uri(named_sets: dict[str, NamedSet]) -> Iterator[list[str]]:
    """Flags for all sets, of which one is an index under a URI, and one a matrix of token ids that has none yet."""
    folder = Path(named_sets["one"].path).parent
    np.save(folder / "labels.npy", np.array(sorted(named_sets["labels"].items)))
    labels = replace(named_sets["labels"], path=str(folder / "labels.npy"))
    with web_server(folder) as (address, _):
        one = replace(named_sets["one"], path=f"{address}/one.itemset")
        yield [*named_flags(named_sets | {"labels": labels, "one": one}), "--item-set-models"]


def post(server: HttpServer, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a body that must be right; prompt and model are added."""
    given = {"model": "tiny", **OPENAI.get(path, {}), "return_token_ids": True, **body}
    status, answer = server.post(path, given)
    assert status == 200, answer
    return answer


def complete(server: HttpServer, **body: Any) -> dict[str, Any]:
    return post(server, "/v1/completions", **{"max_tokens": 200, **body})["choices"][0]


def item_of(choice: dict[str, Any]) -> tuple[int, ...]:
    tokens = next(choice[key] for key in ("token_ids", "response_token_ids", "output_ids") if key in choice)
    return tuple(token for token in tokens if token != 1)


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, or of one event of a stream."""
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content") or ""


def texts_in(answer: Any) -> list[str]:
    """All strings in an answer, as they were before Python showed them."""
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, list):
        return [text for one in answer for text in texts_in(one)]
    return [str(answer).replace("\\'", "'")]


def check_refused(server: HttpServer, path: str, body: Any, message: str) -> Any:
    status, answer = server.post(path, body)
    assert status == 400, answer
    assert any(message in text for text in texts_in(answer)), answer
    return answer


def lives(server: HttpServer, named_sets: dict[str, NamedSet]) -> None:
    assert item_of(complete(server, item_set="one")) in named_sets["one"].items


def test_one_batch_of_sets_and_grammars(server: HttpServer, dialect: Dialect, named_sets: dict[str, NamedSet]) -> None:
    bodies = [*({"item_set": name} for name in named_sets), *(body for body, _ in dialect.others), {}]
    holds = [*(None for _ in named_sets), *(one for _, one in dialect.others), lambda text: True]
    with ThreadPoolExecutor(16) as pool:
        choices = list(pool.map(lambda body: complete(server, **body), bodies * 2))
    for body, holding, choice in zip(bodies * 2, holds * 2, choices, strict=True):
        if holding is None:
            assert item_of(choice) in named_sets[body["item_set"]].items
        else:
            assert holding(choice["text"]), (body, choice["text"])


COMMON: list[tuple[dict[str, Any], str]] = [
    *BAD_SELECTIONS,
    ({"item_set": "films"}, "no item set is called 'films'"),
    ({"item_set": "raged"}, "did you mean 'ragged'"),
    ({"item_set": ["ragged"]}, "item_set must be the name of an item set"),
    ({"item_set": "view:@" * 100_000}, "no item set is called 'view:@view:@"),
    ({"item_set": "x" * 1_000_000}, f"no item set is called '{'x' * 60}'...: it has fixed"),
    ({"item_set": {"a": "x" * 1_000}}, "a string, not an object"),
    ({"item_sets": "labels"}, "there is no field item_sets: name the item set in item_set"),
    ({"item_set": "labels", "item_set_token_healing": False}, "there is no field item_set_token_healing"),
    *(
        ({word: "labels"}, f"there is no field {word}: name")
        for word in ("items_set", "ITEM_SET", "itemSet", "item_sett")
    ),
    ({"extra_body": {"item_set": "one"}}, "there is no field item_set in extra_body"),
    ({"sampling_params": {"item_set": "one"}}, "there is no field item_set in sampling_params"),
    ({"structured_outputs": {"choices": ["a"], "regex": "a"}}, "there is no field choices in structured_outputs: send"),
    ({"guided_choice": ["a"], "item_set": "one"}, "exclude each other"),
    ({"item_set": "one", "guided_regex": "a"}, "an item set and guided_regex exclude each other"),
]  # fmt: skip
"""What either server refuses, and a part of what it says."""


@pytest.mark.parametrize(("body", "message"), COMMON)
def test_a_bad_request_is_http_400_and_the_server_goes_on(
    server: HttpServer, named_sets: dict[str, NamedSet], body: dict[str, Any], message: str
) -> None:
    check_everywhere(server, body, message)
    lives(server, named_sets)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "at least one text"),
        ([""], "is empty"),
        (["ab" * 5_000_000], "has 10,000,000 characters"),
        ("red", "list"),
        (["red", 2], "1"),
    ],
)
def test_bad_texts_are_http_400(server: HttpServer, dialect: Dialect, texts: Any, message: str) -> None:
    check_everywhere(server, dialect.choice(texts), message)


def check_everywhere(server: HttpServer, body: dict[str, Any], message: str) -> None:
    """Refused alike by both endpoints, streamed or not."""
    for path, prompt in OPENAI.items():
        for stream in ({}, {"stream": True}):
            check_refused(server, path, {"model": "tiny", "max_tokens": 20, **prompt, **body, **stream}, message)


def test_an_endpoint_that_would_ignore_the_field_refuses_it(server: HttpServer, dialect: Dialect) -> None:
    paths, first = dialect.deaf
    named = json.dumps({**_FEW, "messages": MESSAGES, "input": "p", "item_set": "one"})
    before = server.figures().get('item_set:refused_requests_total{reason="wrong endpoint"}', 0)
    sent = 0
    for path in paths:
        for data, *content_types in (
            (named.encode(),),
            (named.encode(), "Application/JSON; charset=utf-8"),
            (named.encode(), "application/json", "text/plain"),
            (named.replace("item_set", "item\\u005fset").encode(),),
        ):
            status, answer = server.send(path, data, *content_types)
            assert status == 400, answer
            assert f"{path} takes no item_set: send it to one of {first}" in json.dumps(answer)
            sent += 1
    assert server.figures()['item_set:refused_requests_total{reason="wrong endpoint"}'] == before + sent


def test_a_forced_tool_is_no_item(server: HttpServer, dialect: Dialect) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    path, body = "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "tools": [tool]}
    for words in ({"item_set": "one"}, dialect.choice(COLOURS), *dialect.tools):
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            message = "a tool_choice that forces a tool exclude each other"
            check_refused(server, path, {**body, **words, "tool_choice": choice}, message)
        assert post(server, path, tools=[tool], tool_choice="none", **words)["choices"][0]["item"] is not None


@pytest.mark.parametrize("path", OPENAI)
def test_every_answer_names_its_items_key(
    server: HttpServer, dialect: Dialect, named_sets: dict[str, NamedSet], path: str
) -> None:
    ragged = itemset.load(named_sets["ragged"].path)
    body: dict[str, Any] = {"n": 2, "max_tokens": 40} | ({"prompt": ["a", "b"]} if "chat" not in path else {"n": 3})
    choices = post(server, path, **body, item_set="ragged")["choices"]
    assert len(choices) >= 3
    assert [choice["item"] for choice in choices] == [
        {"key": key} for key in ragged.lookup(list(map(item_of, choices)))
    ]
    for choice in post(server, path, **body, **dialect.choice(COLOURS))["choices"]:
        assert choice["item"] == {"key": COLOURS.index(text_of(choice))}
    texts: dict[int, str] = {}
    items = {}
    streamed = {"model": "tiny", **OPENAI[path], **body, **dialect.choice(COLOURS), "stream": True}
    for event in server.events(path, streamed):
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + text_of(choice)
            assert ("item" in choice) == (choice["finish_reason"] is not None)
            if "item" in choice:
                items[choice["index"]] = choice["item"]
    assert len(items) >= 3
    assert items == {index: {"key": COLOURS.index(text)} for index, text in texts.items()}
    assert "item" not in post(server, path)["choices"][0]


def test_a_space_at_the_end_of_a_prompt_is_the_items_own(server: HttpServer, dialect: Dialect) -> None:
    """Answers are those of a prompt without it, to which items with a space before them are added."""
    ended, texts = "A colour: ", ["red apple", "red", "blue"]
    spaced = {"prompt": ended[:-1], **dialect.choice([" " + text for text in texts])}
    healed = {"prompt": ended, **dialect.choice(texts)}
    lists = [post(server, "/v1/completions", **body, use_beam_search=True, n=3) for body in (spaced, healed)]
    (right, found), (before, tokens) = [one["choices"] for one in lists], [one["usage"] for one in lists]
    assert tokens["prompt_tokens"] == before["prompt_tokens"]
    assert [one["text"] for one in found] == [one["text"].removeprefix(" ") for one in right]
    assert [one["item"]["key"] for one in found] == [one["item"]["key"] for one in right]
    scores = [[one["item"]["score"] for one in choices] for choices in (found, right)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    streamed = {"model": "tiny", **healed, "prompt": [ended, ended[:-1]], "max_tokens": 40, "stream": True}
    answers, items = dict[int, str](), dict[int, Any]()
    for event in server.events("/v1/completions", streamed):
        for choice in event["choices"]:
            answers[choice["index"]] = answers.get(choice["index"], "") + choice["text"]
            items |= {choice["index"]: choice["item"]} if "item" in choice else {}
    assert items == {index: {"key": texts.index(text)} for index, text in answers.items()}
    choice = complete(server, **healed, echo=True)
    assert choice["text"].removeprefix(ended) == texts[choice["item"]["key"]]


@pytest.mark.parametrize("path", OPENAI)
def test_weights(server: HttpServer, path: str) -> None:
    """What they must be: `weight_tests`."""
    body = {"model": "tiny", "max_tokens": 40, "item_set": "ragged", "return_set_weight": True, **OPENAI[path]}
    choices = post(server, path, **body, n=2)["choices"]
    assert len(choices) == 2
    *_, last = (event for event in server.events(path, body | {"stream": True}) if event["choices"])
    for choice in (*choices, *last["choices"]):
        assert choice["item"].keys() == {"key", "set_weight"}
        assert choice["item"]["set_weight"] < 0
        assert choice.get("logprobs") is None
    sampled = "return_set_weight is of one sampled answer with item_set"
    for wrong, message in (
        ({"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1}, "in the place of log"),
        ({"item_set": None}, sampled),
        ({"use_beam_search": True, "n": 2}, sampled),
        ({"draws": 2}, sampled),
        ({"ignore_eos": True}, "with ignore_eos an answer goes on after its end"),
        ({"return_set_weight": 1}, "return_set_weight must be true or false, not 1"),
        ({"return_set_weight": None, "return_set_weights": True}, "there is no field return_set_weights"),
        ({"return_set_weight": None, "vllm_xargs": {"return_set_weight": 1}}, "there is no field return_set_weight"),
    ):
        check_refused(server, path, body | wrong, message)


def audit_folder(named_sets: dict[str, NamedSet]) -> Path:
    return Path(named_sets["one"].path).parent / "audit"


def audit_lines(named_sets: dict[str, NamedSet], answer: str = "") -> list[dict[str, Any]]:
    """What the audit logs of all servers so far hold, of one answer by its id."""
    files = [file.read_bytes() for file in audit_folder(named_sets).iterdir()]
    lines = [json.loads(line) for file in files for line in file.splitlines()]
    return [line for line in lines if line["id"].startswith(answer)]


def test_each_answer_is_a_line_of_the_audit_log(
    server: HttpServer, dialect: Dialect, named_sets: dict[str, NamedSet]
) -> None:
    versions = {one["name"]: one["version"] for one in server.get("/v1/item_sets")[1]["data"]}
    tagged = {"name": "tagged", "version": versions["tagged"]}
    query, seen, word = {"tag": {"$in": [1, 2]}}, ["item 1"], "a wordy prompt"
    digests = [
        hashlib.blake2b((field + json.dumps(value, sort_keys=True)).encode(), digest_size=16).hexdigest()
        for field, value in (("item_filter", query), ("exclude_keys", seen))
    ]
    filtered = {"item_set": "tagged", "item_filter": query, "exclude_keys": seen}
    schema = {"type": "object", "properties": {"x": {"type": "string", "item_set": COLOURS}}, "required": ["x"]}
    inside = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    whole, chosen, inline = [], digests, {"name": "inline", "version": None}
    asked: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
        ({"item_set": "tagged"}, tagged, whole),
        ({"item_set": "tagged", "stream": True}, tagged, whole),
        ({"item_set": "tagged", "return_set_weight": True}, tagged, whole),
        (filtered, tagged, chosen),
        (filtered | {"use_beam_search": True, "n": 3}, tagged, chosen),
        ({"item_set": "tagged", "use_beam_search": True, "n": 3, "width": 4, "max_passes": 50}, tagged, whole),
        ({"item_set": "tagged", "draws": 2}, tagged, whole),
        (dialect.choice(COLOURS), inline, whole),
        (inside, inline, whole),
    ]
    check_refused(server, "/v1/completions", {**_FEW, "prompt": "p", "item_set": "tagg"}, "no item set")
    assert "item" not in complete(server, max_tokens=2)
    for file in audit_folder(named_sets).iterdir():  # somebody makes room: another is begun
        file.unlink()
    ids = list[str]()
    for body, of_set, filters in asked:
        said = {"model": "tiny", "max_tokens": 200, "prompt": word, **body}
        if body.get("stream"):
            *_, answer = (one for one in server.events("/v1/completions", said) if one["choices"])
        else:
            answer = post(server, "/v1/completions", **said)
        ids.append(answer["id"])
        wait_for(partial(audit_lines, named_sets, answer["id"]))
        (line,) = audit_lines(named_sets, answer["id"])
        assert line["model"] == "tiny"
        assert line["sets"] == [of_set | {"filters": filters}]
        items = [one for choice in answer["choices"] for one in choice.get("items", [choice.get("item")])]
        scores = [{"score": one["logprob"]} if "draws" in body else {} for one in items]
        kept = [{name: one[name] for name in ("key", "score", "set_weight") if name in one} for one in items]
        assert line["items"] == [one | score for one, score in zip(kept, scores, strict=True)]
        assert len(kept) == body.get("n", body.get("draws", 1))
    # By their ids: what another test's client has left may end at any time.
    assert [len(audit_lines(named_sets, one)) for one in ids] == [1] * len(ids)
    text = json.dumps(audit_lines(named_sets))
    assert not any(one in text for one in (word, "$in", *COLOURS))


def test_an_answer_that_is_no_item_names_none(server: HttpServer, dialect: Dialect) -> None:
    words = {**dialect.choice(["red and green", "red and blue"]), "n": 2}
    assert complete(server, **words, max_tokens=2)["item"] is None
    assert complete(server, **words, stop="and")["item"] is None
    assert complete(server, **words, ignore_eos=True, max_tokens=60)["item"]["key"] in (0, 1)
    # An item that a stop string or a limit ends is one, unless it might have become a longer one.
    for texts, stop in ((["a film.", "a book."], "."), (["red", "blue"], ["d", "e"]), (["yes!", "no!"], "!")):
        assert complete(server, **dialect.choice(texts), stop=stop)["item"]["key"] in (0, 1)
    assert complete(server, **dialect.choice(["New York", "New York City"]), stop="York")["item"] is None
    assert complete(server, item_set="labels", max_tokens=1)["item"] is not None
    one = complete(server, item_set="prefixes", max_tokens=1)
    assert (one["item"] is None) == (one["token_ids"] == [100])


def test_equal_lists_are_encoded_once_and_hold_up_no_short_one(server: HttpServer, dialect: Dialect) -> None:
    texts = [f"{LONG} {i}" for i in range(100_000)]
    before = encoded(server)
    with ThreadPoolExecutor(3) as pool:
        long = [pool.submit(complete, server, **dialect.choice(texts)) for _ in range(3)]
        wait_for(lambda: encoded(server) > before)
        assert complete(server, **dialect.choice(["one of", "two"]))["text"] in ("one of", "two")
        assert not any(one.done() for one in long)
        assert all(one.result()["text"] in texts for one in long)
    assert complete(server, **dialect.choice(texts))["text"] in texts
    assert encoded(server) - before == len(texts) + 2


def test_encoding_stops_when_the_client_leaves(server: HttpServer, dialect: Dialect) -> None:
    texts = [f"{LONG}, then {i}" for i in range(100_000)]
    before = encoded(server)
    connection = HTTPConnection(server.url.removeprefix("http://"))
    body = json.dumps({"model": "tiny", "prompt": "p", **dialect.choice(texts)})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_for(lambda: encoded(server) > before)
    connection.close()
    others = [f"other label {i}" for i in range(5_000)]
    assert complete(server, **dialect.choice(others))["text"] in others
    counts = [encoded(server)]

    def stands() -> bool:
        time.sleep(0.5)  # in which it would go on
        counts.append(encoded(server))
        return counts[-1] == counts[-2]

    wait_for(stands)
    assert counts[-1] - before < len(texts)


def encoded(server: HttpServer) -> float:
    """Texts of inline sets that it has encoded so far."""
    return server.figures().get("item_set:encoded_texts_total", 0)


@pytest.mark.parametrize("change", changes.IN_PLACE.values(), ids=changes.IN_PLACE.keys())
def test_a_file_that_is_changed_in_place_changes_nothing_that_is_served(
    server: HttpServer, named_sets: dict[str, NamedSet], change: Callable[[Path], None]
) -> None:
    # "large": a map whose pages most requests would read anew, and "one", whose single page all of them would.
    bodies = [{"item_set": name, "seed": i} for i in range(10) for name in ("large", "one")]
    paths = [Path(named_sets[name].path) for name in ("large", "one")]
    with changes.undone(paths[0]), changes.undone(paths[1]), ThreadPoolExecutor(8) as pool:
        for path in paths:
            change(path)
        for body, choice in zip(bodies, pool.map(lambda body: complete(server, **body), bodies), strict=True):
            assert choice["finish_reason"] == "stop"
            assert item_of(choice) in named_sets[body["item_set"]].items


def test_the_playground_shows_what_the_server_says(server: HttpServer, named_sets: dict[str, NamedSet]) -> None:
    playground_checks.check(server.url, named_sets)


# One server of an engine is enough for these.


def test_no_body_loses_its_set(any_server: HttpServer, dialect: Dialect) -> None:
    wrong = lost_words.lost(any_server.post, dialect.bases)
    assert not wrong, "\n".join(map(str, wrong))
    assert not lost_words.unread(any_server.post, dialect.bases, dialect.applies)


def test_hostile_bodies_end_in_an_error_of_their_own(any_server: HttpServer, dialect: Dialect) -> None:
    wrong = []
    for path, base in {
        "/v1/completions": {**_FEW, "prompt": "p"},
        "/v1/chat/completions": {**_FEW, "messages": MESSAGES},
        "/v1/responses": {"model": "tiny", "input": "p", "max_output_tokens": 16},
        "/v1/messages": {**_FEW, "messages": MESSAGES},
        "/invocations": {**_FEW, "messages": MESSAGES},
        "/v1/nothing": {},
        **dialect.endpoints,
    }.items():
        for meant, body in hostile.bodies(base):
            status, answer = any_server.send(path, body)
            if (path, body) in dialect.own_faults and status == 500:
                continue
            if status >= 500 or (meant and status < 400 and path != "/tokenize"):
                wrong.append((path, body[:100], status, str(answer)[:200]))
    assert not wrong, wrong
    assert complete(any_server, item_set="one")["item"] == {"key": 0}


def test_a_set_by_the_models_name(server: HttpServer) -> None:
    """As gateways pass it on that know no field of ours."""
    for path in OPENAI:
        assert post(server, path, model="tiny:one", max_tokens=200)["choices"][0]["item"] == {"key": 0}
        by_field = post(server, path, item_set="labels", use_beam_search=True, n=3, width=8)["choices"]
        by_name = post(server, path, model="tiny:labels?list=3&width=8")["choices"]
        assert [one["item"]["key"] for one in by_name] == [one["item"]["key"] for one in by_field]
        bare = {"model": "tiny:one", "max_tokens": 200} | OPENAI[path]
        check_refused(server, path, bare | {"item_set": "labels"}, "the model names the set 'one'")
        check_refused(server, path, bare | {"model": "tiny:one?wdith=3"}, "there is no 'wdith'")
        check_refused(server, path, bare | {"model": "tiny:onee"}, "did you mean 'one'?")
        assert server.post(path, bare | {"model": "tiny:no set"})[0] >= 400
    listed = {one["id"] for one in server.get("/v1/models")[1]["data"]}
    assert {"tiny", "tiny:one", "tiny:labels"} <= listed


def test_a_server_with_a_bad_set_does_not_start(tiny_model: Path, dialect: Dialect, tmp_path: Path) -> None:
    """Nor with one that does not fit the model; the last line says which, and what to do."""
    itemset.build([[5, 2112]]).save(tmp_path / "films.itemset")
    missing = "static-backend: the item set 'films' cannot be opened: missing.itemset: no such file: build it with"
    for path, last, fresh in (
        ("missing.itemset", missing, True),
        (tmp_path / "films.itemset", "static-backend: the item set 'films'", False),
    ):
        flags = ("--guided-decoding-backend", "static", "--item-set", f"films={path}")
        lines = dialect.start(tiny_model, arguments=flags, fresh=fresh).splitlines()
        assert lines[-1].startswith(last)
        assert not [line for line in lines[-20:] if line.startswith("Traceback")]
