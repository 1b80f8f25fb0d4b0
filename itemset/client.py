"""Items from a server, over the `openai` client that you have: ranked lists, choices, draws, fields of Pydantic models.

Every function takes an `openai.OpenAI` and returns its result, or an `openai.AsyncOpenAI` and returns an awaitable of
it. What the server refuses is the client's own `openai.BadRequestError`, whose message says what to write instead.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, overload

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from pydantic import BaseModel

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text or token ids for /v1/completions, or messages for /v1/chat/completions."""
Sets = str | list[str]
"""The name of a registered set, or a list of texts."""
Model = TypeVar("Model", bound="BaseModel")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Item:
    """An item of a set. `Item["films"]` is the type of a Pydantic field that holds an item of the set `films`.

    key: None if nobody has said it. keys: all of its keys, `key` first. score: of lists and draws, which it orders.
    logprob: the model's, equal to the score unless a request steers. version: of a published set. attributes: of its
    key, if the request asked for them (`item_attributes`).
    """

    key: int | str | None
    text: str
    score: float | None = None
    keys: tuple[int | str, ...] = field(default=(), compare=False, repr=False)
    version: str | None = field(default=None, compare=False, repr=False)
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    logprob: float | None = field(default=None, compare=False, repr=False)

    def __class_getitem__(cls, item_set: Sets) -> Any:
        return Annotated[cls, Of(item_set)]


Later = Awaitable[list[Item]]
"""What an `AsyncOpenAI` gives: items once it is awaited."""


class Of:
    """Makes `Annotated[Item, Of("films", item_filter={...})]` a Pydantic field: a JSON string that is one of the items.

    only: `item_filter`, `exclude_keys`, `only_keys`.
    """

    def __init__(self, item_set: Sets, **only: Any) -> None:
        only = {name: _sent(name, value) for name, value in only.items()}
        self._schema = {"type": "string", "item_set": item_set, **only}

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        text = core_schema.plain_serializer_function_ser_schema(lambda item: item.text)
        return core_schema.no_info_plain_validator_function(_as_item, serialization=text)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return dict(self._schema)


def _as_item(value: Any) -> Item:
    if isinstance(value, str):
        return Item(None, value)
    if not isinstance(value, Item):
        raise ValueError("an item is a text")
    return value


@overload
def rank(client: "OpenAI", item_set: Sets, prompt: Prompt, n: int = 10, **options: Any) -> list[Item]: ...
@overload
def rank(client: "AsyncOpenAI", item_set: Sets, prompt: Prompt, n: int = 10, **options: Any) -> Later: ...
def rank(client: Any, item_set: Sets, prompt: Prompt, n: int = 10, **options: Any) -> Any:
    """Return the n best items of a set by the model's own probabilities, best first, as a beam of 64 finds them, with
    boosts of 128, or of n if that is more: `list[Item]`. `exact=True` proves that there are no better ones.

    n: items; fewer if the set has fewer. options: those of a ranked list (`width`, `exact`, `at_most`, `explore`, ...),
    what chooses among the items (`item_filter`, `exclude_keys`, `only_keys`, `exclude_prompt`), what adds to their
    scores (`boost`, `boost_keys`), and arguments of the client's call (`model`).
    """
    words = _named(item_set) | {"use_beam_search": True, "n": n}
    return _asked(client, prompt, words, options, _items)


@overload
def choose(client: "OpenAI", item_set: Sets, prompt: Prompt, *, n: int, **options: Any) -> list[Item]: ...
@overload
def choose(client: "AsyncOpenAI", item_set: Sets, prompt: Prompt, *, n: int, **options: Any) -> Later: ...
@overload
def choose(client: "OpenAI", item_set: Sets, prompt: Prompt, **options: Any) -> Item: ...
@overload
def choose(client: "AsyncOpenAI", item_set: Sets, prompt: Prompt, **options: Any) -> Awaitable[Item]: ...
def choose(client: Any, item_set: Sets, prompt: Prompt, *, n: int | None = None, **options: Any) -> Any:
    """Return one item, sampled token by token inside the set: `Item`; with `n` a list of n, each sampled for itself.

    options: as of `rank`, and `temperature`, ... Raises ValueError if `max_tokens` or a stop string has cut an answer.
    """
    if n is None:
        return _asked(client, prompt, _named(item_set), options, lambda answer: _items(answer)[0])
    return _asked(client, prompt, _named(item_set), {**options, "n": n}, _items)


@overload
def draw(client: "OpenAI", item_set: Sets, prompt: Prompt, n: int = 1, **options: Any) -> list[Item]: ...
@overload
def draw(client: "AsyncOpenAI", item_set: Sets, prompt: Prompt, n: int = 1, **options: Any) -> Later: ...
def draw(client: Any, item_set: Sets, prompt: Prompt, n: int = 1, **options: Any) -> Any:
    """Return n items drawn from the model's distribution over the set: `list[Item]`. options: as of `rank`, and those
    of draws (`replace`, `seed`, `max_passes`, `approximate`, ...)."""
    return _asked(client, prompt, _named(item_set) | {"draws": n}, options, _items)


@overload
def fill(client: "OpenAI", model: type[Model], prompt: Prompt, **options: Any) -> Model: ...
@overload
def fill(client: "AsyncOpenAI", model: type[Model], prompt: Prompt, **options: Any) -> Awaitable[Model]: ...
def fill(client: Any, model: type[Model], prompt: Prompt, **options: Any) -> Any:
    """Return an instance of a Pydantic model as the server's model fills it in, its items with their keys: `Model`.

    options: arguments of the client's call (`max_tokens`: 256 by default).
    """
    if options.get("n") not in (None, 1):
        raise ValueError(
            "one instance is returned: omit n, or use `read` for each choice of the openai client's answer"
        )
    form = {"type": "json_schema", "json_schema": {"name": model.__name__, "schema": model.model_json_schema()}}
    given = {"response_format": form, "max_tokens": 256, **options}
    return _asked(client, prompt, {}, given, lambda answer: read(model, answer.choices[0]))


def read(model: type[Model], choice: Any) -> Model:
    """Return the instance that a choice holds, items with keys. Raises pydantic.ValidationError if it was cut off."""
    text = (choice.text if hasattr(choice, "text") else choice.message.content) or ""  # None if only thoughts came
    try:
        values = [json.loads(text)]
    except ValueError:
        return model.model_validate_json(text)
    for item in (choice.model_extra or {}).get("items") or ():
        _put(values, item["path"], _as_told(item, item["text"]))
    return model.model_validate(values[0])


def _put(value: Any, path: str, item: Item) -> None:
    """Put an item at a path of the first of these values, in place of what stands there."""
    places = re.findall(r'\.([^.\[]+)|\[("(?:[^"\\]|\\.)*"|\d+)\]', path)  # $.films[2], $["a name"]
    *before, last = 0, *(name or json.loads(other) for name, other in places)
    for place in before:
        value = value[place]
    value[last] = item


def _named(item_set: Sets) -> dict[str, Any]:
    return {"item_set": item_set} if isinstance(item_set, str) else {"structured_outputs": {"choice": item_set}}


def _asked(
    client: Any, prompt: Prompt, words: dict[str, Any], options: dict[str, Any], take: Callable[[Any], Result]
) -> Result | Awaitable[Result]:
    """Ask, and take the result out of the answer. Options that the client's function does not declare are the set's.

    Raises ValueError for what these functions do not return.
    """
    if options.get("stream"):
        raise ValueError("an item is returned as a whole: omit stream, or use the openai client itself")
    if not isinstance(prompt, str) and any(not isinstance(one, int | Mapping) for one in prompt):
        raise ValueError("several prompts take a call each: give one text, its token ids, or messages")
    chat = isinstance(next(iter(prompt), ""), Mapping)
    create = client.chat.completions.create if chat else client.completions.create
    declared = inspect.signature(create).parameters
    given = {"model": "", "messages" if chat else "prompt": prompt}
    extra = {**words, **options.pop("extra_body", {})}
    for name, value in options.items():
        (given if name in declared else extra)[name] = _sent(name, value)
    answer = create(**given, extra_body=extra)
    return _later(answer, take) if inspect.isawaitable(answer) else take(answer)


def _sent(name: str, value: Any) -> Any:
    if name not in ("exclude_keys", "only_keys") or isinstance(value, str | list | None):
        return value
    return value.tolist() if hasattr(value, "tolist") else list(value)  # an array, a set


async def _later(answer: Awaitable[Any], take: Callable[[Any], Result]) -> Result:
    return take(await answer)


def _items(answer: Any) -> list[Item]:
    return [_item(choice) for choice in answer.choices]


def _item(choice: Any) -> Item:
    extra = choice.model_extra or {}
    if "item" not in extra:
        raise ValueError("the answer names no item: start the server with --item-set and the backend static")
    text, item = choice.text if hasattr(choice, "text") else choice.message.content, extra["item"]
    if item is None:
        raise ValueError(
            f"the answer {text!r:.60} is no whole item: max_tokens or a stop string has cut it, or an abort"
        )
    return _as_told(item, text)


def _as_told(item: Mapping[str, Any], text: str) -> Item:
    key, score = item.get("key"), item.get("score", item.get("logprob"))
    keys, version = tuple(item.get("keys") or (key,)), item.get("item_set_version")
    return Item(key, text, score, keys, version, item.get("attributes") or {}, item.get("logprob"))
