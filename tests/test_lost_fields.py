"""The rule by which no body loses its set: what an endpoint does not declare holds no word of ours."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import lost_words
import pytest
from pydantic import BaseModel, Field

from itemset.embedded.placement import JSON, TAG
from itemset.embedded.rewrite import Marker, mentions
from itemset.errors import ItemSetError
from itemset.serving.catalogue import RefusedError
from itemset.serving.front import lost_fields, request_fields
from itemset.serving.front.lost_fields import constraints_of, holds_sets, refuse_loose_tools


class Format(BaseModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] | None = Field(alias="schema", default=None)


@dataclass
class Outputs:
    choice: list[str] | None = None
    json: dict | None = None


class Body(BaseModel):
    prompt: str | list[str]
    metadata: dict[str, Any] | None = None
    messages: list[Format] = []
    response_format: Annotated[Format | None, Field(description="x")] = None
    structured_outputs: Outputs | None = None
    vllm_xargs: dict[str, Any] | None = None
    format: dict | None = None


class AnyBody(BaseModel):
    response_format: Any = None


FIELDS = lost_fields.fields_of_type(Body)
SURFACE = lost_fields.Surface(
    served={"/a": {"": ("item_set",)}},
    elsewhere={"vllm_xargs": ("item_set",)},
    dropped=("format",),
    mends=dict.fromkeys(request_fields.WORDS, "the mend"),
    inside="its place",
)


def check(body: Any, path: str = "/a", *, ours: bool = True) -> None:
    SURFACE.check(path, body, FIELDS, ours=ours)


def test_what_an_endpoint_declares():
    assert set(FIELDS) == set(Body.model_fields)
    assert set(lost_fields.fields_of_type(FIELDS["response_format"])) == {"type", "schema"}
    assert set(lost_fields.fields_of_type(FIELDS["structured_outputs"])) == {"choice", "json"}
    for content in ("messages", "metadata", "prompt"):
        assert not lost_fields.fields_of_type(FIELDS[content])
    route = SimpleNamespace(body_field=SimpleNamespace(field_info=SimpleNamespace(annotation=Body)))
    assert lost_fields.fields_of_route({"route": route}, {}) == FIELDS
    passing_on = {"route": SimpleNamespace(body_field=None), "app": SimpleNamespace(routes=[route, object()])}
    assert lost_fields.fields_of_route(passing_on, {"prompt": "p"}) == FIELDS
    assert lost_fields.fields_of_route(passing_on, {"query": "p"}) == {}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"item_sets": "a"}, "there is no field item_sets: the mend"),
        ({"slate": {}}, "there is no field slate: the mend"),
        ([{}, {"slate": {}}], "there is no field slate: the mend"),
        ({"vllm_xargs": {"slate": 1}}, "there is no field slate in vllm_xargs: the mend"),
        ({"custom_params": {"item_set": "a"}}, "there is no field item_set in custom_params"),
        ({"response_format": {"type": "json_schema", "item_set": "a"}}, "no field item_set in response_format"),
        ({"structured_outputs": {"choices": ["a"]}}, "there is no field choices in structured_outputs"),
        ({"guided_json": lost_words.schema()}, "/a does not read the item set at guided_json.properties.x.item_set"),
        ({"guided_json": json.dumps(lost_words.schema())}, "at guided_json.properties.x.item_set: its place"),
        ({"guided_json": json.dumps(lost_words.schema()).replace("_", "\\u005f")}, "at guided_json.properties.x."),
        ({"guided_grammar": lost_words.GRAMMAR}, "at guided_grammar: its place"),
        ({"format": lost_words.schema()}, "at format.properties.x"),
        ({"extra_body": {"structured_outputs": {"json": lost_words.schema()}}}, "extra_body.structured_outputs.json"),
        ({"extra_body": json.dumps({"item_set": "a"})}, "at extra_body.item_set"),
        ({"a": [{"properties": {"item_set": "films"}}]}, r"at a\[0\].properties.item_set"),
        ({"a": {"b": {"guided_choice": ["a"]}}}, "at a.b.guided_choice"),
        ({"a": {"structured_output": {"choice": ["a"]}}}, "at a.structured_output"),
        ({f"key{i}": {"item_set": i} for i in range(5_000)}, "at one of its fields"),
        ({**{f"key{i}": i for i in range(5_000)}, "slate": 1}, "there is no field slate"),
        ({"a": [{"x": i} for i in range(5_000)] + [{"item_set": "films"}]}, "at one of its fields"),
    ],
)  # fmt: skip
def test_a_set_that_would_be_lost_is_refused(body, message):
    with pytest.raises(RefusedError, match=message):
        check(body)
    with pytest.raises(RefusedError, match="send it to one of /a" if isinstance(body, dict) else "/b takes no slate"):
        check(body, "/b")


@pytest.mark.parametrize(
    "body",
    [
        {"item_set": "films", "vllm_xargs": {"item_set": "films"}},
        {"prompt": "item_set ItemSet(", "metadata": {"item_set": 1, "deep": {"slate": 2}}},
        {"messages": [{"item_set": "films"}]},
        {"response_format": {"type": "json_schema", "schema": lost_words.schema()}},
        {"structured_outputs": {"choice": ["a"], "json": lost_words.schema()}},
        {"guided_json": lost_words.NAMED},
        {"guided_json": json.dumps(lost_words.NAMED)},
        {"guided_json": {"const": {"item_set": "films"}}},
        {"chat_template_kwargs": {"item_set": 1}, "stop": ["ItemSet("], "documents": [{"slate": 1}]},
        {"a": {"slate": "grey", "choice": 1, "draw": 2, "time_set": 3}},
        {"a": [{"x": i} for i in range(5_000)]},
        {**{f"key{i}": i for i in range(5_000)}, "item_set": "films", "prompt": "item_set"},
        {"item_sets": None, "guided_json": {"item_set": None}},
    ],
)
def test_other_bodies_pass(body):
    check(body)


def test_what_an_endpoint_declares_as_anything():
    fields = lost_fields.fields_of_type(AnyBody)
    SURFACE.check("/a", {"response_format": lost_words.response_format()}, fields, ours=True)
    SURFACE.check("/a", {"response_format": lost_words.TAG}, fields, ours=True)
    for given in ({"type": "text", "item_set": "a"}, {"json_schema": {"name": "x", "item_set": "a"}}):
        with pytest.raises(RefusedError, match="there is no field item_set in response_format"):
            SURFACE.check("/a", {"response_format": given}, fields, ours=True)


def test_every_word_in_every_place():
    """Bounded, and always the same: words, and sets inside, at random places that nothing declares."""
    rng = random.Random(7)
    said: list[dict[str, Any]] = [{"item_set": "a"}, {"x": lost_words.schema()}, {"x": lost_words.GRAMMAR}]
    said += [{"structured_outputs": {"choice": ["a"]}}, {"guided_choice": ["a"]}, {"x": {"slate": lost_words.SLATE}}]
    for _ in range(500):
        body: Any = rng.choice(said)
        for _ in range(rng.randrange(1, 6)):
            name = rng.choice(["a", "extra_body", "options", "sampling_params", "items", "json", "schema"])
            body = {"b": 1, name: rng.choice([body, [1, body], {"anyOf": [body]}, json.dumps(body)])}
        with pytest.raises(RefusedError):
            check(body, "/b")
        check({"metadata": body, "prompt": json.dumps(body), "response_format": {"schema": {"enum": [body]}}}, "/b")


def test_another_backend_looks_for_sets_alone():
    check({"slate": {}}, ours=False)
    with pytest.raises(RefusedError):
        check({"item_sets": "a"}, ours=False)


@pytest.mark.parametrize("schema", list(lost_words.schemas()), ids=json.dumps)
def test_a_set_that_would_not_hold_in_a_schema(schema):
    for given in (schema, json.dumps(schema)):
        assert mentions(given)
        with pytest.raises((ItemSetError, RuntimeError)):
            Marker(lambda place: 3).mark(JSON, given)


def test_a_property_of_our_words_name_is_no_set():
    assert Marker(lambda place: 3).mark(JSON, lost_words.NAMED) is None
    assert not holds_sets(JSON, lost_words.schema(properties={"item_sets": {"type": "string"}}, required=[]))


def test_constraints_are_found_where_a_body_states_them():
    given = lost_words.schema()
    for body in (
        {"response_format": lost_words.response_format()},
        {"response_format": {"schema": given}},
        {"text": {"format": {"schema": given}}},
        {"output_config": {"format": {"schema": given}}},
        {"structured_outputs": {"json": given}},
        {"sampling_params": {"structured_outputs": {"json": given}}},
        {"sampling_params": [{"json_schema": given}]},
    ):
        assert constraints_of(body, body) == [(JSON, given)]
    assert (
        constraints_of(
            {"text": "item_set", "response_format": lost_words.response_format({"type": "string"})},
            ["text", "response_format"],
        )
        == []
    )
    assert constraints_of({"json_schema": given}, []) == []
    tag = lost_words.TAG
    assert constraints_of({"response_format": {**tag, "type": "text"}}, ["response_format"]) == [(TAG, tag)]


def test_tools_of_every_form():
    given = lost_words.schema()
    for tool in (
        {"function": {"name": "f", "parameters": given}},
        {"name": "f", "parameters": given},
        {"name": "f", "input_schema": given},
        {"type": "namespace", "tools": [{"name": "f", "parameters": given}]},
    ):
        with pytest.raises(RefusedError, match="the parameters of the tool 'f' hold an item_set"):
            refuse_loose_tools([tool], None, lambda strict: strict, named_holds=False)
