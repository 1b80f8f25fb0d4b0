"""What the playground asks of a server, and of an index if it has one. It needs no engine; an index needs `itemset`.

Both engines answer the same requests: those of the OpenAI format, with the fields that the plugin adds.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

MAX_TOKENS = 64
WANTED = 3  # tokens of the model's own, for each place


class ServerError(Exception):
    """What the server says is wrong, in its own words."""


@dataclass(frozen=True)
class Choice:
    """The items that a request chooses from: fields of its body."""

    fields: dict[str, Any]

    @classmethod
    def of(cls, item_set: str | None, item_filter: str = "", exclude: str = "", inline: str = "") -> Choice:
        """Make a choice of what was typed. inline: a list of items, a line each, in place of the set.

        Raises ServerError for what no server could be asked: what is no JSON, no set, a part of a list.
        """
        if lines := [line.strip() for line in inline.splitlines() if line.strip()]:
            if item_filter.strip() or exclude.strip():
                raise ServerError("item_filter and exclude_keys choose from a set, not a list: clear them, or the list")
            return cls({"structured_outputs": {"choice": lines}})
        if not item_set:
            raise ServerError("choose a set, or type a list")
        fields: dict[str, Any] = {"item_set": item_set}
        if item_filter.strip():
            fields["item_filter"] = parsed(item_filter, "item_filter")
        if exclude.strip():
            fields["exclude_keys"] = parsed(f"[{exclude.strip().strip('[]')}]", "exclude_keys")
        return cls(fields)


def parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerError(f"{what} must be JSON, with texts in quotes, and was not sent: {error}") from error


@dataclass(frozen=True)
class Ranked:
    """An item of a ranked list."""

    text: str
    score: float
    logprob: float  # the model's own: the score without boosts
    keys: list[int | str]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Allowed:
    """What a set allows at a place. The end of the item counts as one."""

    count: int
    ends: bool
    texts: list[str] | None  # of the other tokens; without a tokenizer nobody knows them


@dataclass(frozen=True)
class Step:
    """A token of an answer, and what the model would have liked there without the set."""

    token: int
    text: str
    probability: float
    wanted: list[tuple[str, float]]  # the likeliest tokens of the whole vocabulary
    allowed: Allowed | None = None  # None: the app has no index of the set

    @property
    def forced(self) -> bool:
        return self.allowed is not None and self.allowed.count == 1

    @property
    def overruled(self) -> bool:
        """Return whether the model's first choice was another token. It may have been allowed, and not been drawn."""
        return self.wanted[0][1] > self.probability

    def allows(self, text: str, end: str) -> bool | None:
        """Return whether a token with this text was allowed, None if unknown. end: the text of the end token."""
        if self.allowed is None or self.allowed.texts is None:
            return None
        return text in self.allowed.texts or (self.allowed.ends and text == end)


@dataclass(frozen=True)
class Path:
    """A sampled answer, token by token."""

    text: str
    item: dict[str, Any] | None
    steps: list[Step]


class Index:
    """An index file of a set, for what a server does not say: what is allowed, and the attributes of a key."""

    def __init__(self, path: str, tokenizer: str | None = None) -> None:
        import itemset
        from itemset.text import load_tokenizer

        self._items = itemset.load(path)
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer else None
        if self._tokenizer is not None:
            self._items.check_tokenizer(self._tokenizer)
        self._part = lru_cache(8)(self._made_part)

    def _made_part(self, chosen: str) -> Any:
        import itemset

        fields = json.loads(chosen)
        options = {name: fields[name] for name in ("exclude_keys", "only_keys") if name in fields}
        return itemset.view(self._items, fields.get("item_filter"), **options)

    def allowed(self, choice: Choice, before: list[int]) -> Allowed:
        """Return what may follow these tokens of an answer."""
        fields = {name: value for name, value in choice.fields.items() if name != "item_set"}
        part = self._part(json.dumps(fields, sort_keys=True)) if fields else self._items
        found, ends = part.children(before)
        texts = [self._tokenizer.decode([token]) for token in found.tolist()] if self._tokenizer else None
        return Allowed(len(found) + bool(ends), bool(ends), texts)

    def spreads(self) -> dict[str, float]:
        """Return the standard deviation of each attribute that is a number and differs among the items."""
        import pyarrow as pa
        import pyarrow.compute as pc

        table, found = self._items.attributes, dict[str, float]()
        for name in table.column_names:
            kind = table.column(name).type
            if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
                found[name] = pc.stddev(table.column(name).cast(pa.float64())).as_py() or 0.0
        return {name: spread for name, spread in found.items() if spread > 0}

    def attributes(self, key: int | str) -> dict[str, Any]:
        import pyarrow as pa
        import pyarrow.compute as pc

        table = self._items.attributes
        row = pc.index(self._items.keys, pa.scalar(key, self._items.keys.type)).as_py() if table.column_names else -1
        return {} if row < 0 else table.slice(row, 1).to_pylist()[0]


class Server:
    """A server with an OpenAI interface and this plugin. indexes: of some of its sets, by name."""

    def __init__(self, url: str, api_key: str = "none", indexes: dict[str, Index] | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ServerError(f"{url} is no address of a server: give one such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        self.indexes = indexes or {}
        card = self._asked("/models")["data"][0]
        self.model, self.engine = card["id"], card.get("owned_by", "")

    def sets(self) -> list[dict[str, Any]]:
        """Return the sets that the server has: `name`, and its other fields."""
        sets: list[dict[str, Any]] = self._asked("/item_sets")["data"]
        return sets

    def ranked(self, prompt: str, choice: Choice, n: int, **options: Any) -> list[Ranked]:
        """Ask for the best items with scores. options: width, exact, max_passes, boost, renormalised, without_end."""
        body = {"prompt": prompt, "use_beam_search": True, "n": n, **options}
        return [
            Ranked(
                one["text"],
                one["item"]["score"],
                one["item"]["logprob"],
                one["item"]["keys"],
                self._attributes(choice, one["item"]["key"]),
            )
            for one in self._completed(choice, body)
        ]

    def boost(self, choice: Choice, weights: Mapping[str, float]) -> dict[str, Any]:
        """Return the field for boosts in units of the attributes' spreads; none if all are 0.

        Raises ServerError: an attribute that the index of the chosen set has not, or whose numbers are all alike.
        """
        asked = {name: weight for name, weight in weights.items() if weight}
        if not asked:
            return {}
        index = self.indexes.get(choice.fields.get("item_set", ""))
        spreads = index.spreads() if index else {}
        if missing := [name for name in asked if name not in spreads]:
            raise ServerError(f"this set has no {', '.join(missing)} to boost by: move the slider to 0")
        return {"boost": {name: weight / spreads[name] for name, weight in asked.items()}}

    def path(self, prompt: str, choice: Choice, **sampling: Any) -> Path:
        """Ask for an answer, and for the model's own probabilities of its tokens without the set: two requests."""
        (one,) = self._completed(choice, {"prompt": prompt, "return_token_ids": True, **sampling})
        before, tokens = one["prompt_token_ids"], one["token_ids"]
        again = {"prompt": before + tokens, "echo": True, "logprobs": WANTED, "max_tokens": 1, "temperature": 0}
        told = self._posted("/completions", again)["choices"][0]["logprobs"]
        index = self.indexes.get(choice.fields.get("item_set", ""))
        steps = []
        for i, token in enumerate(tokens):
            at = len(before) + i
            probability = math.exp(told["token_logprobs"][at])
            likely = sorted(told["top_logprobs"][at].items(), key=lambda one: -one[1])[:WANTED]
            wanted = [(text, math.exp(logprob)) for text, logprob in likely]
            allowed = index.allowed(choice, tokens[:i]) if index else None
            steps.append(Step(token, told["tokens"][at], probability, wanted, allowed))
        return Path(one["text"], one["item"], steps)

    def sampled(self, prompt: str, choice: Choice, n: int, **sampling: Any) -> Counter[str]:
        """Count how often each item is the answer to n requests under the mask. Cut answers count as one."""
        answers = self._completed(choice, {"prompt": prompt, "n": n, "temperature": 1.0, **sampling})
        return Counter(one["text"] if one["item"] else "(cut)" for one in answers)

    def drawn(self, prompt: str, choice: Choice, n: int, **options: Any) -> tuple[Counter[str], int]:
        """Count how often each item is drawn from the model's own distribution over the set, and the exact draws.

        options: max_passes, approximate, seed.
        """
        answers = self._completed(choice, {"prompt": prompt, "draws": n, **options})
        return Counter(one["text"] for one in answers), sum(one["item"]["exact"] for one in answers)

    def inside(self, question: str, constraint: dict[str, Any], **sampling: Any) -> tuple[str, list[dict[str, Any]]]:
        """Ask a chat for an answer with items in it; return it and the items.

        constraint: fields of the body, such as `response_format`.
        """
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 160, **sampling, **constraint}
        choice = self._posted("/chat/completions", body)["choices"][0]
        text = choice["message"]["content"]
        whole = choice.get("item")  # of an answer that is one item
        if whole:
            return text, [{"text": text, "path": "the whole answer", "set": "", "keys": [whole["key"]]}]
        return text, choice.get("items") or []

    def _attributes(self, choice: Choice, key: int | str) -> dict[str, Any]:
        index = self.indexes.get(choice.fields.get("item_set", ""))
        return index.attributes(key) if index else {}

    def _completed(self, choice: Choice, body: dict[str, Any]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self._posted(
            "/completions", {"max_tokens": MAX_TOKENS, **body, **choice.fields}
        )["choices"]
        return answers

    def _posted(self, path: str, body: dict[str, Any]) -> Any:
        return self._asked(path, json.dumps({"model": self.model, **body}).encode())

    def _asked(self, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ServerError(f"HTTP {error.code}: {_message(error.read().decode(errors='replace'))}") from error
        except OSError as error:
            raise ServerError(f"{self.url}{path}: {error}: does vLLM or SGLang listen there?") from error
        except ValueError as error:
            raise ServerError(f"{self.url}{path} did not answer with JSON: ask for no stream") from error


def _message(body: str) -> str:
    """Return the sentence of an error's body. vLLM has it within `error`, SGLang beside the rest."""
    try:
        told = json.loads(body)
        return str(told.get("error", told)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return body
