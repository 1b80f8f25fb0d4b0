"""Where SGLang keeps what a request asks of item sets: an ItemRequest at `sampling_params["item_set"]`, once judged."""

from array import array
from collections.abc import Collection, Mapping
from numbers import Integral
from typing import Any

from itemset.embedded.placement import EBNF, JSON, TAG
from itemset.errors import shown
from itemset.serving.catalogue import RefusedError
from itemset.serving.front import request_fields
from itemset.serving.front.http_bodies import body
from itemset.serving.front.lost_fields import holds_sets, undisguised
from itemset.serving.front.request import ItemRequest, candidates, refuse_beside, wants_candidates, wants_draws
from itemset.serving.front.request_fields import BEAMS, CHOICE, CUSTOM, REFERENCE, SLATE, attributes_asked
from itemset.serving.front.selections import Prompt
from sglang_static import compat

CARRIED = "item_set_list"  # attribute of the `GenerateReqInput` that asks for a list in one request: its EngineRequest
_WORDS = (*request_fields.OF_SET, CHOICE)
_OF_LIST = (request_fields.LIST, request_fields.LIST_AFTER, *request_fields.OPTIONS)
KINDS = {"json_schema": JSON, "ebnf": EBNF, "structural_tag": TAG}  # constraints in which item sets can stand
OTHERS = ("json_schema", "regex", "ebnf", "structural_tag")  # SGLang's own constraints, in `sampling_params`


def places(params: Mapping[str, Any], fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return where our words may stand: in the body of an HTTP request, of which these are the `fields`, in
    `sampling_params` as SGLang's own `regex` does, and in their `custom_params`."""
    custom = params.get(CUSTOM)
    return [fields, custom if isinstance(custom, dict) else {}, params]


def names_set(params: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Return whether one prompt names a set for its whole answer, or brings one."""
    return any(place.get(word) is not None for place in places(params, fields) for word in (REFERENCE, CHOICE))


def wants_list(params: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Return whether the parameters of a prompt ask for a beam search, or for draws."""
    if any(map(wants_draws, places(params, fields))) or wants_candidates(params):
        return True
    return bool(fields.get(BEAMS)) or params.get("beam_width") not in (None, 0, 1)


def asked(params: Mapping[str, Any], fields: Mapping[str, Any], *, ranked: bool) -> ItemRequest | None:
    """Return what the parameters of one prompt, and the fields of its body, say of item sets; None if nothing.

    ranked: whether the prompts of its request get lists. Of a constraint it is not known yet whether sets stand in it.
    Raises RefusedError as `ItemRequest.of` does, and for words of a beam search that mean nothing here.
    """
    if isinstance(before := params.get(REFERENCE), ItemRequest):  # the same request comes again
        return before
    each = places(params, fields)
    given = {key: value for place in each for key, value in place.items()}
    others = [key for key in OTHERS if params.get(key)]
    k, twice, drawn = None, False, wants_draws(given)
    if wants_candidates(params):
        given, k = candidates(given, params)
        drawn = k is None
        given |= _of_draws({**params, "n": None}, fields) if drawn else {}
    elif drawn:
        given |= _of_draws(params, fields)
    elif ranked:
        k = 1 if params.get("n") is None else params["n"]
        if not isinstance(k, int) or k < 1:
            raise request_fields.wrong_type(f"n must be a number of items from 1 on, not {shown(k)}", "n")
        if not fields.get(BEAMS):  # SGLang: the beam, or n of it
            twice, width = given.get("width") is not None, params.get("beam_width") or 1
            given["width"] = width
            k = width if k == 1 or (isinstance(k, int) and isinstance(width, int) and k > width) else k
    request = ItemRequest.of(
        [place.get(REFERENCE) for place in each],
        [place.get(CHOICE) for place in each],
        given,
        k=k,
        draws=drawn,
        where="sampling_params",
        constraints=(REFERENCE, CHOICE, ", ".join(others) or "other constraints"),
        other=bool(others),
    )
    if request is None:
        attributes = attributes_asked(given)
        if (stated := constraint_of(params, fields)) is not None:
            return ItemRequest(constraint=stated, attributes=attributes)
        if attributes:
            raise request_fields.wrong_type(request_fields.NO_ATTRIBUTES, request_fields.ATTRIBUTES)
    elif twice:
        message = "beam_width is the width of a list here: leave width out, and give n"
        raise RefusedError("beam search", message, "width")
    elif not ranked and wants_list(params, fields):
        message = "beam_width would ignore the item set here: leave it out, and use n for several answers"
        raise RefusedError("beam search", message, "beam_width")
    return request


def _of_draws(params: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of draws in SGLang's own words. Raises RefusedError for what draws cannot follow."""
    if fields.get(BEAMS):  # on an OpenAI endpoint SGLang has filled the parameters in
        return {name: fields.get(name) for name in ("seed", "temperature")}
    refuse_beside(params)
    seeds = (*(place.get("seed") for place in places(params, fields)), params.get("sampling_seed"))
    seed = next((seed for seed in seeds if seed is not None), None)
    return {"seed": seed, "temperature": params.get("temperature")}


def in_place(params: Mapping[str, Any], request: ItemRequest) -> dict[str, Any]:
    """Return the parameters of one prompt in which the judged request stands in place of what it was read from."""
    own = without_words(params)
    if isinstance(own.get(CUSTOM), dict):
        own[CUSTOM] = without_words(own[CUSTOM]) or None
    read = (*KINDS,) if request.constraint is not None else _OF_LIST if request.after else ()
    if (request.constraint is None or request.constraint[0] == SLATE) and not request.after:
        own = {"max_new_tokens": None} | own | ({"max_new_tokens": None} if body().unlimited else {})
    return {**{key: value for key, value in own.items() if key not in read}, REFERENCE: request}


def without_words(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key not in _WORDS}


def constraint_of(params: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return kind and text of a prompt's constraint in which sets can stand, or None. fields: as for `places`."""
    for place in places(params, fields):
        if place.get(SLATE) is not None:
            return SLATE, place[SLATE]
    given = next(((kind, params[name]) for name, kind in KINDS.items() if params.get(name)), None)
    return (TAG, undisguised(given[1])) if given is not None and given[0] == TAG else given


def names_sets(params: Mapping[str, Any]) -> bool:
    """Return whether a set stands in the constraint of one prompt."""
    given = constraint_of(params, {})
    return given is not None and holds_sets(*given)


PROMPTS = ("text", "input_ids", "input_embeds", "session_params", "lora_path")  # fields that have to do with prompts
_DROPPED = (  # by lists, which requests of our own make
    *("return_hidden_states", "return_routed_experts", "return_sampling_mask", "session_params", "session_id"),
    *("image_data", "video_data", "audio_data"),
)


def check_prompts(request: Any, *, listed: bool) -> None:
    """Raises RefusedError for prompts, and lists of parameters, that do not go together: SGLang would answer 500.
    request: a GenerateReqInput, or what is known of it. listed: whether it is to get lists or draws."""
    prompts, alone = given_prompts(request)
    if request.text is not None and isinstance(request.text, str) != alone:
        raise request_fields.wrong_type("text and input_ids are of different prompts: give one of them", "input_ids")
    session = request.session_params or {}
    if not isinstance(session, dict) or not all(isinstance(one, str | int | None) for one in session.values()):
        message = f"session_params must be an object of texts, numbers and bools, not {session!r:.60}"
        raise request_fields.wrong_type(message, "session_params")
    known = compat.messages.SessionParams.__struct_fields__
    if unknown := [name for name in session if name not in known]:
        message = f"session_params has no {unknown[0]!r:.60}, it has {', '.join(known)}"
        raise request_fields.wrong_type(message, "session_params")
    if not alone and not (
        _are(str, prompts) or (_are(list | tuple | array, prompts) and all(_are(Integral, one) for one in prompts))
    ):
        others = request.session_params or (prompts is None and request.input_embeds is not None)
        if not others or listed:
            what = "a ranked list or draws need" if listed else "an item set needs"
            message = f"{what} a prompt: give text, or input_ids, one or a list that is not empty"
            raise request_fields.wrong_type(message, "text")
        return
    for name in ("sampling_params", "lora_path", "cache_salt", "extra_key"):
        value = getattr(request, name, None)
        if isinstance(value, list) and alone:
            raise request_fields.wrong_type(f"{name} of one prompt is no list: take it out of that", name)
        if isinstance(value, list) and len(value) != len(prompts):
            message = f"{name} is a list of {len(value)}, and there are {len(prompts)} prompts: give one for each"
            raise request_fields.wrong_type(message, name)
    for name in _DROPPED if listed else ():
        if getattr(request, name, None) not in (None, False, []):
            raise RefusedError("beam search", f"a ranked list or draws would ignore {name}: omit it", name)


def given_prompts(request: Any) -> tuple[Any, bool]:
    """Return what a `GenerateReqInput` has for prompts, None if these are embeddings, and whether it is one alone."""
    prompts = request.text if request.input_ids is None else request.input_ids
    return prompts, isinstance(prompts, str) or _are(Integral, prompts)


def prompts_of(request: Any) -> list[Prompt]:
    """Return the prompts of a `GenerateReqInput`; an empty one if they are embeddings."""
    prompts, alone = given_prompts(request)
    return [prompts] if alone else list(prompts or [()])


def take_spaces(request: Any, places: Collection[int]) -> None:
    """Take the spaces back at which some prompts of a `GenerateReqInput` end, by their places."""
    texts = request.text
    alone = isinstance(texts, str)
    request.text = texts[:-1] if alone else [text[:-1] if i in places else text for i, text in enumerate(texts)]


def _are(kind: Any, values: Any) -> bool:
    """Return whether values are of this kind, in a list that is not empty."""
    kinds = set(map(type, values)) if isinstance(values, list | tuple | array) else ()
    return bool(kinds) and all(issubclass(one, kind) for one in kinds)
