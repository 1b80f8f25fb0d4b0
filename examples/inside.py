"""Answers that hold films: JSON with a film in it, three different films, and texts whose every <film> is a real one.

`python3 bootstrap.py demo` shows them. With a server that has a set called `films`, this is a chat:

python3 examples/inside.py --url http://localhost:8000/v1 --model path/to/model
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

from serving import MODEL_NAME, post

FILM = {"type": "string", "item_set": "films"}
TIP = {
    "type": "object",
    "properties": {"film": FILM, "mood": {"enum": ["light", "dark"]}},
    "required": ["film", "mood"],
}
THREE = {"type": "array", "items": FILM, "uniqueItems": True, "minItems": 3, "maxItems": 3}
TAG = {"begin": "<film>", "content": {"type": "item_set", "item_set": "films"}, "end": "</film>"}
TEXT = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<film>"], "tags": [TAG]}}
BEFORE = [
    {"role": "system", "content": "You talk about films. Write each title between <film> and </film>."},
    {"role": "user", "content": "A film about the war in Vietnam?"},
    {"role": "assistant", "content": "You should see <film>Platoon (1986)</film>."},
]


def as_json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "films", "schema": schema}}


def asked(url: str, model: str, messages: list[dict[str, str]], response_format: dict[str, Any]) -> dict[str, Any]:
    """Ask a server; return the choice of its answer, with the message and the items in it."""
    body = {"model": model, "messages": messages, "temperature": 0.7, "seed": 1, "max_tokens": 120}
    choice: dict[str, Any] = post(url + "/chat/completions", body | {"response_format": response_format})["choices"][0]
    return choice


def show(url: str, title_of: dict[int, str]) -> bool:
    """Print an answer of each kind with its films' keys; return True if every film in them is one of the list."""
    good = True
    for question, response_format in (
        ("A film for a rainy Sunday, as JSON?", as_json(TIP)),
        ("Three films for children, as a JSON list?", as_json(THREE)),
        ("Which films are like <film>Alien (1979)</film>? Answer in one sentence.", TEXT),
    ):
        messages = [*BEFORE, {"role": "user", "content": question}]
        choice = asked(url, MODEL_NAME, messages, response_format)
        text, items = choice["message"]["content"], choice["items"]
        print(f"\n{question}\n{text.strip()}\nkeys: {[item['key'] for item in items]}")
        named = re.findall("<film>(.*?)</film>", text) if response_format is TEXT else _strings(text)
        if choice["finish_reason"] == "stop":  # else a limit has cut the answer
            good &= [item["text"] for item in items] == named
        good &= all(title_of[item["key"]] == item["text"] for item in items)
    return good


def _strings(text: str) -> list[str]:
    """Return the films of a JSON answer, none if a limit has cut it."""
    try:
        answer = json.loads(text)
    except ValueError:
        return []
    return answer if isinstance(answer, list) else [answer["film"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--model", required=True, help="as the server calls it")
    arguments = parser.parse_args()
    messages = list(BEFORE)
    for line in sys.stdin if not sys.stdin.isatty() else iter(lambda: input("you: "), ""):
        messages.append({"role": "user", "content": line.strip()})
        choice = asked(arguments.url, arguments.model, messages, TEXT)
        print(choice["message"]["content"], [item["key"] for item in choice["items"]], sep="\n")
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
