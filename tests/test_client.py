"""`itemset.client.read`, of choices as the openai client holds them. A server's answers are in `client_checks`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, RootModel, ValidationError

from itemset.client import Item, read

Film = Item["films"]


class Tip(BaseModel):
    films: dict[str, list[Film]]


def choice_of(content: str | None, items: list[dict[str, Any]]) -> Choice:
    message = {"role": "assistant", "content": content}
    return Choice.model_validate({"finish_reason": "stop", "index": 0, "message": message, "items": items})


def test_an_item_stands_at_any_path_also_alone() -> None:
    for name in ("x", "x.y", "x[0]", "", 'q"z', "$"):
        path = f"$.films[{json.dumps(name)}][1]"
        tip = read(Tip, choice_of(json.dumps({"films": {name: ["a", "b"]}}), [{"path": path, "key": 3, "text": "b"}]))
        assert tip.films == {name: [Item(None, "a"), Item(3, "b")]}
    alone = read(RootModel[Film], choice_of('"b"', [{"path": "$", "key": 3, "text": "b"}]))
    assert alone.root == Item(3, "b")


@pytest.mark.parametrize("content", [None, "", '{"films": {"x": ["a'])
def test_an_answer_that_was_cut_off_is_no_instance(content: str | None) -> None:
    with pytest.raises(ValidationError):
        read(Tip, choice_of(content, []))
