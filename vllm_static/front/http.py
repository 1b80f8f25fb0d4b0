"""The HTTP surface: the request field `item_set`, and refusals where vLLM would drop a constraint in silence."""

from collections.abc import Collection
from typing import Any

from itemset.embedded.placement import JSON, TAG
from itemset.embedded.rewrite import mentions
from itemset.errors import shown
from itemset.serving.catalogue import RefusedError
from itemset.serving.front import http_bodies, lost_fields, request_fields
from itemset.serving.front.healing import ends_in_space
from itemset.serving.front.lost_fields import constraints_of, disguised, holds_sets, refuse_loose_tools, refuse_lost
from itemset.serving.front.model_names import take_set
from itemset.serving.front.request import DRAWING, ItemRequest, wants_draws, with_beams
from itemset.serving.front.request_fields import BEAMS, GUIDED, OF_SET, REFERENCE, SELECTION, SLATE, STRUCTURED, XARGS
from vllm_static import compat
from vllm_static.front.front_end import follow
from vllm_static.front.request import constraint_of, judge, put
from vllm_static.metrics import PATH, Figures

_RENDER = "/render"  # the end of endpoints' names
SURFACE = lost_fields.Surface(
    served={path: {"": (*OF_SET, GUIDED)} for path in ("/v1/chat/completions/batch", "/v1/responses")}
    | {path: {"": (*OF_SET, GUIDED, *request_fields.OF_ITEMS)} for path in DRAWING},
    # What vLLM takes for its engine's parameters reaches the engine as it is.
    elsewhere={XARGS: (REFERENCE, *SELECTION), "sampling_params.extra_args": (REFERENCE, *SELECTION, SLATE)},
    mends=lost_fields.mends('structured_outputs: {"choice": [...]}', " or ".join(DRAWING)),
    inside="name a set in item_set, beside the other fields; state a schema in response_format or structured_outputs: "
    '{"json": ...} (/v1/responses: text.format), a grammar in structured_outputs: {"grammar": ...}',
)


class ItemSetWords(http_bodies.BodyMiddleware):
    """vLLM's --middleware. Brings the engine's figures up to date before /metrics shows them."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self._figures = Figures()

    async def begin(self, scope: Any) -> None:
        """At the start of a server it gets its routes, which vLLM's API key protects, and follows published sets."""
        if scope["type"] == "lifespan" and compat.front_end_of(scope["app"].state) is not None:
            http_bodies.add_routes(scope["app"], lambda state: getattr(compat.front_end_of(state), "follower", None))
            follow(scope["app"].state.engine_client)
        elif scope.get("path") == PATH and scope.get("method") == "GET":
            await self._figures.refresh(scope["app"])

    def sets_by_model(self, scope: Any) -> Collection[str]:
        front_end = compat.front_end_of(scope["app"].state)
        return () if front_end is None else front_end.sets_by_model

    def check(self, scope: Any, given: Any) -> None:
        """Puts `choice` for vLLM's older word, and draws on the way of beam searches."""
        ours, body = compat.front_end_of(scope["app"].state) is not None, http_bodies.body()
        if body.path in http_bodies.ANSWERED:
            take_set(given, self.sets_by_model(scope))
        fields = lost_fields.fields_of_route(scope, given)
        SURFACE.check(body.path, given, fields, ours=ours)
        body.stated = constraints_of(given, fields)
        if not ours or not isinstance(given, dict):
            return
        body.unlimited = body.path == "/v1/completions" and given.get("max_tokens") is None
        _take_choice(given)
        if not body.path.endswith(_RENDER):
            stated, structured = given.get("response_format"), given.get(STRUCTURED)
            if isinstance(stated, dict) and stated.get("type") == TAG:
                given["response_format"] = disguised(stated)
            if isinstance(structured, dict) and TAG in structured:
                structured[TAG] = disguised(structured[TAG])
        with_beams(given, body.path)


def _take_choice(given: dict[str, Any]) -> None:
    structured = given.get(STRUCTURED)
    if given.get(GUIDED) is not None and structured is not None:
        raise RefusedError("two constraints", f"{GUIDED} is an older word for {STRUCTURED}: give one of them")
    if structured is not None and not isinstance(structured, dict):  # vLLM would answer 500
        raise request_fields.wrong_type(f"{STRUCTURED} must be an object, not {shown(structured)}")
    if given.get(GUIDED) is not None:
        given[STRUCTURED] = {}
        request_fields.rename_guided(given, given[STRUCTURED])
    named = any(one.get(REFERENCE) is not None for one in (given, *request_fields.objects(given.get(XARGS))))
    http_bodies.body().brings_choice = brings = lost_fields.chooses(given.get(STRUCTURED))
    if named or brings or given.get(SLATE) is not None:
        request_fields.refuse_tools(given)


def judge_request(request: Any) -> None:
    """Judge what an OpenAI request asks of item sets, before vLLM makes its parameters of it.

    Raises RefusedError as `ItemRequest.of` does, and for a list that the endpoint does not give, or from which
    log-probabilities, a stream or another constraint are asked.
    """
    body = http_bodies.body_of(request)
    ranked, fields = _declared(request, BEAMS), request.model_extra or {}
    elsewhere = bool(fields.get(BEAMS))  # a field that the endpoint does not know
    k = (request.n or 1) if ranked else 1 if elsewhere else None
    body.judged = _judged(request, k=k, draws=bool(ranked))
    body.each = _declared(request, "n") or 1
    if body.path.endswith(_RENDER):  # its answer is the parameters, which meet no other hook
        with_item_set(request.to_sampling_params(1, {}))
    if body.judged is not None and fields.get("stream"):  # which would cut its items' texts
        raise request_fields.wrong_type(f"{body.path} has no streams: leave stream out", "stream")
    if body.judged is None or k is None:
        return
    if elsewhere:
        message = "there are ranked lists on /v1/completions and /v1/chat/completions alone: send it there"
        raise RefusedError("beam search", message, BEAMS)
    if request.logprobs is not None and request.logprobs is not False:  # 0 asks for the sampled tokens' own
        message = "a ranked list has no logprobs of single tokens: leave logprobs out"
        raise RefusedError("beam search", message, "logprobs")
    if request.stream:
        raise RefusedError("beam search", "a ranked list is not streamed: leave stream out", "stream")
    if request.response_format is not None and request.response_format.type != "text":
        message = "a ranked list and response_format exclude each other: leave response_format out"
        raise RefusedError("two constraints", message, "response_format")


async def make_sets(front_end: Any) -> None:
    """Make the set of a request that was judged, and those in a stream's constraints: once its answer has begun, it is
    too late to refuse one. Raises as `FrontEndBase.prepare` does."""
    body = http_bodies.body()
    if body.judged is not None:
        given = _declared(body.request, "prompt")
        prompt = next(filter(ends_in_space, given if isinstance(given, list) else [given]), None)
        if prompt is not None:
            healed = await front_end.healed(body.judged, prompt)
            body.judged = healed if prompt is given else body.judged  # each prompt of a list is healed by itself
        body.judged = await front_end.prepare(body.judged)
    for stated in body.stated if getattr(body.request, "stream", False) else ():
        await front_end.constraints.prepare(*stated)


def with_item_set(params: Any) -> Any:
    """Put what the request that is being served asks of item sets into the parameters that vLLM has made of it.

    Raises RefusedError for sets that vLLM has dropped from these, or that stand in tools which it leaves free.
    """
    body = http_bodies.body()
    request, given = body.request, constraint_of(params)  # vLLM has made one of the tools, or none
    if request is None:
        return params
    fields = request.model_extra or {}
    if getattr(request, "tools", None) and getattr(request, "tool_choice", None) not in (None, "none"):
        kind = given[0] if given is not None and holds_sets(*given) else None
        choice = request.tool_choice
        refuse_loose_tools(
            [tool.model_dump() for tool in request.tools],
            choice if isinstance(choice, str) else choice.model_dump(),
            lambda strict: kind == JSON or (kind == TAG and strict),
            named_holds=False,
        )
    if body.judged is not None:
        if not hasattr(params, "beam_width"):
            if body.brings_choice and getattr(params.structured_outputs, "choice", None) is None:
                raise _lost_choice()
            judge(params.extra_args, params.structured_outputs, fields, k=None)  # with vLLM's constraint
            if body.unlimited:
                params.max_tokens = None  # in place of 16
        params = put(params, body.judged)
    elif said := {word: fields[word] for word in (SLATE, request_fields.ATTRIBUTES) if fields.get(word) is not None}:
        params.extra_args = {**(params.extra_args or {}), **said}
        if SLATE in said and body.unlimited:
            params.max_tokens = None  # a slate ends, as an item does
    given = constraint_of(params)
    reached = given is not None and (given[0] == SLATE or mentions(given[1]))
    refuse_lost(body.stated, reached=reached)
    return params


def _declared(request: Any, name: str) -> Any:
    """Return a field of a request that its endpoint knows; None for another, which may be anything."""
    return getattr(request, name) if name in type(request).model_fields else None


def _lost_choice() -> RefusedError:
    return RefusedError(
        "two constraints",
        "the inline set would be lost: either this endpoint takes none, or vLLM makes a constraint of the tools in "
        "its place; leave the tools out, or send it to /v1/chat/completions",
        STRUCTURED,
    )


def _judged(request: Any, *, k: int | None, draws: bool) -> ItemRequest | None:
    extra_args, structured = _declared(request, XARGS), _declared(request, STRUCTURED)
    fields, body = request.model_extra or {}, http_bodies.body()
    if k is None and (extract := getattr(request, "extract_structured_outputs", None)):
        structured = extract()  # that of a response_format, too
    if draws and wants_draws(fields):  # fields that vLLM knows, and that mean something for draws
        fields = fields | {name: getattr(request, name) for name in ("seed", "temperature")}
    brings = structured is not None and structured.choice is not None
    if body.brings_choice and not brings:
        raise _lost_choice()
    each, ours = (fields, extra_args or {}), (*OF_SET, *request_fields.OF_ITEMS)
    if not brings and not any(place.get(word) is not None for place in each for word in ours):
        return None
    judged = judge(extra_args, structured, fields, k=k, draws=draws)
    if fields.get("beam_width") is not None:
        message = f"there is no field beam_width: a ranked list takes {BEAMS}, n, and width for the beams of its search"
        raise RefusedError("beam search", message, "beam_width")
    return judged
