"""The hooks by which a request with an item set passes SGLang's front end, of a server or offline."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from itemset.errors import ItemSetError
from itemset.serving.config import start_up
from itemset.serving.front import http_bodies
from itemset.serving.front.request_fields import LOGPROBS, REFERENCE
from sglang_static import compat
from sglang_static.compat import hook
from sglang_static.front import answers
from sglang_static.front.request import CARRIED, names_sets, places, without_words


@hook("sglang.srt.entrypoints.http_server:app", extends=True)
def _add_middleware(app: Any) -> None:
    """The middleware that brings a body's fields to its request, innermost; the routes of /v1/item_sets."""
    from starlette.middleware import Middleware

    from sglang_static.front import http

    if not any(one.cls is http.ItemSetFields for one in app.user_middleware):
        app.user_middleware.append(Middleware(http.ItemSetFields))
        http_bodies.add_routes(app, lambda state: compat.follower_of(compat.server_manager()))


@hook("sglang.srt.managers.tokenizer_manager:TokenizerManager.init_tokenizer_and_processor", always=True)
def _init_tokenizer(original: Callable[..., Any], self: Any) -> None:
    """The front end, made at start-up."""
    original()
    self.static_front_end = None
    if compat.is_ours(self.server_args):
        from sglang_static.front.front_end import FrontEnd

        with start_up():
            self.static_front_end = FrontEnd(self)


@hook("sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request")
async def _generate_request(
    original: Callable[..., Any], self: Any, obj: Any, request: Any
) -> AsyncGenerator[Any, None]:
    """Requests are judged, inline sets encoded beside the event loop; a ranked list in place of a beam search."""
    compat.follower_of(self)  # once there is an event loop
    if self.static_front_end is not None and hasattr(obj, "custom_logit_processor"):
        from itemset.serving import metrics
        from sglang_static.front import list_requests

        with metrics.refusals():
            # Encoding a large inline set takes seconds, and all below runs on the event loop.
            client = None if getattr(obj, "background", False) else request  # nobody waits for that one
            ranked = await self.static_front_end.judge(obj, client)
            thoughts = []
            async for part in list_requests.ranked(original, self, obj, client) if ranked else original():
                if list_requests.is_thought(part):
                    thoughts.append(part)
                    continue
                answers.note(part)
                yield part
            if thoughts:
                await list_requests.add_lists(thoughts, client)
            for part in thoughts:
                answers.note(part)
                yield part
            return
    async for part in original():
        yield part


@hook("sglang.srt.entrypoints.http_server:ORJSONRequest.json", always=True)
def _parse_body(original: Callable[..., Any], self: Any) -> Any:
    """A body is judged once parsed, before words are dropped."""
    return http_bodies.judged(hook, original, self)


@hook("sglang.srt.managers.tokenizer_manager:TokenizerManager._create_tokenized_object", always=True)
def _create_tokenized_object(original: Callable[..., Any], self: Any, obj: Any, input_ids: Any) -> Any:
    """The item set is attached to its request."""
    front_end = self.static_front_end
    if front_end is None:
        given = obj.sampling_params if isinstance(obj.sampling_params, dict) else {}
        named = any(place.get(REFERENCE) for place in places(given, http_bodies.body().fields or {}))
        if named or names_sets(given):  # ignored, or an unknown parameter
            raise ItemSetError("this engine has no item sets: start it with --grammar-backend static and --item-set")
        return original()
    if (carried := getattr(obj, CARRIED, None)) is not None:
        tokenized = original()
        tokenized.sampling_params.custom_params = carried.json()
        return tokenized
    given, obj.sampling_params = obj.sampling_params, without_words(obj.sampling_params)
    asked = given.get(REFERENCE)
    if asked is not None and asked.weighed and not asked.after:  # log p and log q come in their place
        obj.return_logprob, obj.top_logprobs_num = True, int(asked.weighed == LOGPROBS)
        setattr(obj, answers.WEIGHED, asked.weighed)
    try:
        tokenized = original()
    finally:
        obj.sampling_params = given  # the same request may be tokenized again
    if asked is not None:
        front_end.attach(asked, obj, tokenized.sampling_params, list(input_ids or ()))
    return tokenized
