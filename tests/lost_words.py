"""Bodies that name sets in every place where people put them, for the servers of both engines.

None may be answered 200 without its set: either the set is applied, or HTTP 400 names the place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

TEXTS = ["zqx", "zqy", "zqz"]  # which no other text has
HELD = {"type": "string", "item_set": TEXTS}
GRAMMAR = f"root ::= ItemSet({json.dumps(TEXTS)})"
SLATE = {"item_set": TEXTS, "n": 2}
TAG = {"type": "structural_tag", "format": {"type": "item_set", "item_set": TEXTS}}


def schema(held: Any = HELD, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": held}, "required": ["x"], "additionalProperties": False, **more}


def response_format(given: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": given or schema()}, **more}


MESSAGES = [{"role": "user", "content": "p"}]
_FEW = {"model": "tiny", "max_tokens": 20}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**_FEW, "prompt": "p"},
    "/v1/chat/completions": {**_FEW, "messages": MESSAGES},
    "/v1/responses": {"model": "tiny", "input": "p", "max_output_tokens": 20},
    "/v1/messages": {**_FEW, "messages": MESSAGES},
    "/invocations": {**_FEW, "messages": MESSAGES},
}
VLLMS = BASES | {
    "/v1/chat/completions/batch": {**_FEW, "messages": [MESSAGES]},
    "/inference/v1/generate": {"token_ids": [7, 8], "output_mode": "text", "sampling_params": {"max_tokens": 20}},
    "/v1/completions/render": {**_FEW, "prompt": "p"},
    "/v1/chat/completions/render": {**_FEW, "messages": MESSAGES},
}
SGLANGS = BASES | {
    "/generate": {"text": "p", "sampling_params": {"max_new_tokens": 20}},
    "/api/generate": {"model": "tiny", "prompt": "p", "stream": False, "options": {"num_predict": 20}},
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "stream": False, "options": {"num_predict": 20}},
    "/vertex_generate": {"instances": [{"text": "p"}], "parameters": {"sampling_params": {"max_new_tokens": 20}}},
}
"""What each endpoint needs."""

BARE: dict[str, Any] = {
    "item_set": "labels",
    "slate": SLATE,
    "choice": TEXTS,
    "guided_choice": TEXTS,
    "item_sets": "one",
}
CONSTRAINTS: dict[str, Any] = {
    "guided_json": schema(),
    "guided_grammar": GRAMMAR,
    "structured_outputs": {"json": schema()},
    "structured_output": {"json": schema()},
    "response_format": response_format(),
    "text": {"format": {"type": "json_schema", "name": "x", "schema": schema()}},
    "output_config": {"format": {"type": "json_schema", "schema": schema()}},
    "json_schema": json.dumps(schema()),
    "json": schema(),
    "grammar": GRAMMAR,
    "ebnf": GRAMMAR,
    "structural_tag": json.dumps(TAG),
    "format": schema(),
}
OTHER_WAYS: list[dict[str, Any]] = [
    {"guided_json": json.dumps(schema())},
    {"structured_outputs": {"json": json.dumps(schema())}},
    {"structured_outputs": {"grammar": GRAMMAR}},
    {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
    {"structured_outputs": {"choice": TEXTS}},
    {"structured_outputs": {"json": schema()}, "response_format": response_format(schema({"type": "string"}))},
    {"structured_outputs": {"json": schema()}, "response_format": response_format()},
    {"structured_outputs": {"json": schema()}, "use_beam_search": True, "n": 2},
    {"structured_outputs": {"json": schema()}, "item_set": "labels"},
    {"response_format": TAG},
    {"response_format": {"type": "json_schema", "schema": schema()}},
    {"response_format": response_format(type="text")},
    {"response_format": response_format(type="json_object")},
    {"response_format": response_format(use_beam_search=True), "use_beam_search": True, "n": 2},
    {"response_format": {"type": "text", "item_set": "labels"}},
    {"response_format": {"type": "text", "format": TAG["format"]}},
    {"response_format": response_format(), "json_schema": json.dumps(schema({"type": "string"}))},
    {"response_format": response_format(schema({"type": "string"})), "json_schema": json.dumps(schema())},
    {"json_schema": json.dumps(schema()), "ebnf": GRAMMAR},
    {"stream_options": {"item_set": "labels"}, "stream": True},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema()}}]},
    {"tools": [{"name": "f", "input_schema": schema()}], "tool_choice": {"type": "auto"}},
    {"tools": [{"type": "function", "name": "f", "parameters": schema()}]},
    {"instances": [{"text": "p", "item_set": "labels"}]},
    {"item_set": "labels", "use_beam_search": True, "n": 2, "beam_width": 4},
    {"item_set": "labels", "beam_width": 4},
]
WRAPPERS = ("extra_body", "vllm_xargs", "custom_params", "extra_args", "sampling_params", "parameters", "options")


def ways() -> Iterator[dict[str, Any]]:
    """What stands beside what an endpoint needs, each with a set in it."""
    single = [{key: value} for key, value in (*BARE.items(), *CONSTRAINTS.items())]
    yield from (*single, *OTHER_WAYS)
    for wrapper in WRAPPERS:
        yield from ({wrapper: one} for one in (*single, {"structured_outputs": {"choice": TEXTS}}))
    for inner in ("custom_params", "extra_args", "vllm_xargs"):
        yield from ({"sampling_params": {inner: one}} for one in single)
    for unknown in (single[0], *({key: value} for key, value in CONSTRAINTS.items())):
        yield {"unknown": {"deep": [unknown]}}


def schemas() -> Iterator[dict[str, Any]]:
    """Schemas in which a set is meant and does not hold."""
    for word in ("item_sets", "item-set", "itemSet", "Item_Set", "items_set"):
        yield schema({"type": "string", word: TEXTS})
        yield {"$defs": {"a": {"type": "string", word: TEXTS}}, **schema({"$ref": "#/$defs/a"})}
        yield schema({"not": {"type": "string", word: TEXTS}})
    for word in ("$dynamicRef", "$recursiveRef"):
        yield schema({word: "#/$defs/a"}, **{"$defs": {"a": HELD}})
        yield schema({word: "#a"}, **{"$defs": {"a": {**HELD, "$dynamicAnchor": "a"}}})
        yield schema({"anyOf": [{"type": "null"}, {word: "#/$defs/a"}]}, **{"$defs": {"a": HELD}})
        yield schema({"type": "array", "items": {word: "#"}}, **{"$defs": {"a": HELD}})
    yield schema({"$ref": "#a"}, **{"$defs": {"a": {**HELD, "$anchor": "a"}}})
    yield schema({"type": "string", "only_keys": ["zqx"]})
    yield schema({"type": "string", "item_filter": {"a": 1}})


LEGITIMATE: list[dict[str, Any]] = [
    {"user": "item_set"},
    {"metadata": {"item_set": "films", "slate": "blue"}},
    {"stop": ["ItemSet("]},
    {"unknown": {"slate": "grey", "choice": 3, "items": [1], "state": {"draw": 1}}},
    {"chat_template_kwargs": {"item_set": "films"}},
    {"logit_bias": {"7": 1}},
]
"""Bodies that say our words and mean no set, or another thing by them."""
NAMED = schema() | {"properties": {"item_set": {"enum": ["zqx"]}}, "required": ["item_set"]}
"""A schema with a property of our word's name."""


_BOTH = [{"item_set": "labels"}, {"slate": SLATE}, {"guided_choice": TEXTS}, {"structured_outputs": {"choice": TEXTS}}]
_OPENAI = [*_BOTH, {"response_format": response_format()}, {"response_format": response_format(NAMED)}]
_VLLMS = [{"structured_outputs": one} for one in ({"json": schema()}, {"grammar": GRAMMAR})]
_RENDERED = [*_VLLMS, {"structured_outputs": {"choice": TEXTS}}, {"vllm_xargs": {"item_set": "labels"}}]
_RESPONSES = [*_BOTH, {"text": CONSTRAINTS["text"]}]
VLLM_APPLIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [*_OPENAI, *_RENDERED, {"response_format": TAG}],
    "/v1/chat/completions": [*_OPENAI, *_RENDERED, {"response_format": TAG}],
    "/v1/chat/completions/batch": [*_OPENAI, *_VLLMS],
    "/v1/responses": [*_RESPONSES, *_RENDERED],
    "/v1/messages": [{"output_config": CONSTRAINTS["output_config"]}, {"vllm_xargs": {"item_set": "labels"}}],
    "/inference/v1/generate": [{"sampling_params": one} for one in (*_VLLMS, *({"extra_args": x} for x in _BOTH[:2]))],
    "/invocations": [*_RENDERED, {"response_format": response_format()}],
    "/v1/completions/render": _RENDERED,
    "/v1/chat/completions/render": _RENDERED,
}
SGLANG_APPLIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [*_OPENAI, {"json_schema": json.dumps(schema())}, {"ebnf": GRAMMAR}],
    "/v1/chat/completions": [
        *_OPENAI,
        {"ebnf": GRAMMAR},
        {"response_format": {"type": "json_schema", "schema": schema()}},
    ],
    "/v1/responses": _RESPONSES,
    "/v1/messages": [{"output_config": CONSTRAINTS["output_config"]}],
    "/generate": [*_BOTH, *({"sampling_params": one} for one in (*_BOTH[:3], {"ebnf": GRAMMAR}))],
}
"""What each endpoint does read."""


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Objects of the same name become one."""
    both = {key: {**base[key], **more[key]} for key in base.keys() & more if isinstance(base[key], dict)}
    return {**base, **more, **both}


def applied(answer: Any) -> bool:
    """Whether an answer, or a rendered request, has items of the set."""
    said = answer.get("output", answer) if isinstance(answer, dict) else answer  # beside it is what was asked
    text = said if isinstance(said, str) else json.dumps(said)
    if "zq" in text:
        return True
    usage = (answer.get("usage") or answer.get("meta_info") or {}) if isinstance(answer, dict) else {}
    tokens = [usage.get(name) for name in ("completion_tokens", "output_tokens")]
    return 2 in tokens or '"item_set": "labels"' in text


def lost(post: Any, bases: dict[str, dict[str, Any]]) -> list[Any]:
    """Bodies that a server answers without their sets. post: of a path and a body, its status and its answer."""
    found = []
    for path, base in bases.items():
        for more in ways():
            status, answer = post(path, merged(base, more))
            if status >= 500 or (status < 400 and not applied(answer)):
                found.append((path, json.dumps(more)[:200], status, str(answer)[:300]))
    for given in schemas():
        body = merged(bases["/v1/chat/completions"], {"response_format": response_format(given)})
        status, answer = post("/v1/chat/completions", body)
        if status != 400:
            found.append(("schema", json.dumps(given), status, str(answer)[:300]))
    return found


def unread(post: Any, bases: dict[str, dict[str, Any]], applies: dict[str, list[dict[str, Any]]]) -> list[Any]:
    """Bodies whose sets are not applied though their endpoint reads them, or that mean none and are refused."""
    found = []
    for path, ways_ in applies.items():
        for more in (*ways_, *LEGITIMATE):
            status, answer = post(path, merged(bases[path], more))
            if status != 200 or not (more in LEGITIMATE or applied(answer)):
                found.append((path, json.dumps(more)[:200], status, str(answer)[:300]))
    return found
