"""What the playground must say of a server that has the item sets of the tests, whichever engine it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from sets import NamedSet, tagged_items

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import playground_page as page
from playground_client import Choice, Index, Server, ServerError

COLOURS = ["red", "green & blue"]
SCHEMA = {"type": "array", "items": {"type": "string", "item_set": COLOURS}, "minItems": 1, "maxItems": 3}


def check(url: str, named_sets: Mapping[str, NamedSet]) -> None:
    server = Server(url, indexes={"tagged": Index(named_sets["tagged"].path)})
    assert named_sets.keys() <= {one["name"] for one in server.sets()}
    some = Choice.of("tagged", '{"tag": 1}', '"item 1", "item 4"')
    _check_ranked(server, some)
    _check_path(server, some)
    colours = Choice.of("", inline="\n".join(COLOURS))
    sampled = server.sampled("p", colours, 4)
    drawn, exact = server.drawn("p", colours, 4)
    assert (sampled.total(), drawn.total(), exact) == (4, 4, 4)
    assert sampled.keys() | drawn.keys() <= set(COLOURS)
    assert "4 of 4 draws are exact" in page.compared(sampled, drawn, exact)
    told = {"response_format": {"type": "json_schema", "json_schema": {"name": "colours", "schema": SCHEMA}}}
    text, items = server.inside("colours?", told)
    assert page.marked(text, items).count("<mark>") == len(items) > 0
    text, items = server.inside("a thing?", {"item_set": "tagged"})
    assert page.marked(text, items).count("<mark>") == len(items) == 1
    with pytest.raises(ServerError, match="must be JSON, with texts in quotes"):
        Choice.of("tagged", exclude="item 1")
    with pytest.raises(ServerError, match="clear them, or the list"):
        Choice.of("tagged", '{"tag": 1}', inline="red")
    with pytest.raises(ServerError, match="choose a set"):
        Choice.of(None)
    with pytest.raises(ServerError, match="no address of a server"):
        Server("localhost:8000")
    with pytest.raises(ServerError, match=r"HTTP 400: .*no item set is called 'tags'"):
        server.ranked("p", Choice.of("tags"), 2)


def _check_ranked(server: Server, some: Choice) -> None:
    found = server.ranked("p", some, 5, width=16)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    numbers = [int(str(key).removeprefix("item ")) for one in found for key in one.keys]
    assert len(found) == 5
    assert not {1, 4} & set(numbers)
    assert all(number % 3 == 1 and one.attributes == {"tag": 1} for number in numbers for one in found)
    assert page.ranked(found).count("tag: 1") == 5
    every = Choice.of("tagged")
    steered = server.ranked("p", every, 5, width=64, **server.boost(every, {"tag": 5.0}))
    assert all(
        any(int(str(key).split()[1]) % 3 == 2 for key in one.keys) for one in steered
    )  # the largest tag of a key
    assert all(one.score > one.logprob for one in steered)
    assert "log-probability" in page.ranked(steered)
    assert "log-probability" not in page.ranked(found)
    assert server.boost(every, {"tag": 0}) == {}
    with pytest.raises(ServerError, match="this set has no price to boost by"):
        server.boost(every, {"price": 1.0})


def _check_path(server: Server, some: Choice) -> None:
    """Each step's allowed tokens are those that the items left say."""
    left = {tuple(item) for i, item in enumerate(tagged_items()) if i % 3 == 1 and i not in (1, 4)}
    path = server.path("p", some, temperature=1.0)
    *tokens, _ = [step.token for step in path.steps]
    assert tuple(tokens) in left
    for i, step in enumerate(path.steps):
        follow = {item[: i + 1] for item in left if item[:i] == tuple(tokens[:i])}  # an item that ends here is shorter
        assert (step.allowed.count, step.forced) == (len(follow), len(follow) == 1)
        assert 0 < step.probability < 1
    assert page.path(path).count("(forced)") == sum(step.forced for step in path.steps)
