"""The hooks by which a request with an item set passes vLLM's front end, of a server or offline."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Any

from itemset.errors import ItemSetError
from itemset.serving import metrics, startup
from itemset.serving.config import BACKEND
from itemset.serving.hooks import IMPORTED
from itemset.serving.request_fields import REFERENCE, SLATE, STRUCTURED
from vllm_static import answers, compat
from vllm_static.compat import hook


@hook("vllm.v1.engine.input_processor:InputProcessor.__init__", always=True)
def _input_processor_init(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
    """Item sets are opened and checked once a front end, before the engine starts."""
    original()
    self.static_front_end = None
    if compat.is_ours(vllm_config):
        from vllm_static.front_end import FrontEnd

        with startup.start_up():
            if self.tokenizer is None:
                raise ValueError("the static backend needs the model's tokenizer: leave out skip_tokenizer_init")
            self.static_front_end = FrontEnd(vllm_config, self.tokenizer)


@contextlib.contextmanager
def refusals(params: Any = None) -> Iterator[None]:
    """What is wrong with an item set becomes vLLM's own error for one bad request, HTTP 400, counted. params: the
    request's, or the request; its slate or its structured outputs are at fault if no other field is."""
    try:
        with metrics.refusals():
            yield
    except ItemSetError as error:
        from vllm.exceptions import VLLMValidationError

        from vllm_static.request import asks_slate

        own = REFERENCE if getattr(params, STRUCTURED, None) is None else STRUCTURED
        own = SLATE if asks_slate(params) else own
        raise VLLMValidationError(str(error), parameter=getattr(error, "param", None) or own) from error


@hook("vllm.v1.engine.input_processor:InputProcessor.process_inputs", always=True)
def _process_inputs(original: Callable[..., Any], self: Any, params: Any) -> Any:
    """The item set is attached to its request: every request passes here, with its prompt's length known."""
    from vllm.sampling_params import SamplingParams

    from vllm_static.request import asked, names_sets, put

    front_end, item_request = self.static_front_end, None
    if isinstance(params, SamplingParams):
        with refusals(params):
            if not front_end and names_sets(params):  # it would be ignored
                flags = "--structured-outputs-config.backend static and --item-set"
                raise ItemSetError(f"this engine has no item sets: start it with {flags}")
            if front_end and (judged := asked(params)) is not None:
                params = put(params, item_request := front_end.pinned(judged))
    request = original(params=params)
    if item_request is not None:
        prompt_tokens = len(request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids)
        with refusals(params):
            expecting = front_end.attach(item_request, request.sampling_params, prompt_tokens)
            setattr(request.sampling_params, answers.EXPECTED, expecting)
    return request


@hook("vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar", when=IMPORTED, always=True)
def _validate_xgrammar_grammar(original: Callable[..., Any], sampling_params: Any) -> None:
    """VLLM's parsers of bodies refuse a structural tag with an item set, before its place is marked."""
    from itemset.serving.constraint import TAG
    from itemset.serving.lost_fields import holds_sets
    from vllm_static.request import constraint_of

    given = constraint_of(sampling_params)
    if given is None or given[0] != TAG or not holds_sets(*given):
        original()


@hook("vllm.v1.engine.async_llm:AsyncLLM.__init__", why="published sets are followed while the engine runs")
def _async_llm_init(original: Callable[..., Any], self: Any) -> None:
    original()
    if self.input_processor.static_front_end:
        from vllm_static.version_watcher import follow

        follow(self)


@hook("vllm.plugins:load_endpoint_plugins", optional=True)
def _load_endpoint_plugins(original: Callable[..., Any]) -> Any:
    """/v1/item_sets: vLLM adds a plugin's routes if VLLM_PLUGINS names it; here the flags have chosen it."""
    from vllm_static.version_watcher import Routes

    return [*original(), Routes()]


@hook("vllm.v1.engine.async_llm:AsyncLLM.add_request")
async def _add_request(original: Callable[..., Any], self: Any, params: Any) -> Any:
    """Inline sets are encoded, and filters applied, beside the event loop."""
    front_end = self.input_processor.static_front_end
    if front_end and (getattr(params, "structured_outputs", None) or getattr(params, "extra_args", None)) is not None:
        from vllm_static.request import asked, put
        from vllm_static.version_watcher import follow

        follow(self)  # where there was no event loop before
        # Encoding a large inline set takes seconds, and process_inputs runs on the event loop.
        with refusals(params):
            if (item_request := asked(params)) is not None:
                params = put(params, await front_end.prepare(item_request))
    return await original(params=params)


@hook("vllm.sampling_params:SamplingParams._validate_structured_outputs")
def _validate_structured_outputs(
    original: Callable[..., Any], self: Any, model_config: Any, structured_outputs_config: Any
) -> None:
    """Knows the built-in backends only: other constraints are validated as xgrammar's."""
    config, structured = structured_outputs_config, self.structured_outputs
    if config is None or structured is None or config.backend != BACKEND or compat.has_registry():
        original()
    elif structured.choice is None and isinstance(structured.grammar, str | None):
        original(structured_outputs_config=compat.xgrammar_config(config))
    elif model_config.is_diffusion:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError("Item sets are not supported for diffusion language models.")


@hook(
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_sampling_params",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_sampling_params",
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest.to_sampling_params",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_beam_search_params",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_beam_search_params",
    always=True,
)
def _to_params(original: Callable[..., Any], self: Any) -> Any:
    """The field item_set; constraints that vLLM drops for a beam search, or replaces by a tool's schema."""
    from vllm_static import http

    params = original()
    add = http.rank_item_set if hasattr(params, "beam_width") else http.add_item_set
    return refusals(self)(add)(self, params)


@hook("vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search", when=IMPORTED)
def _beam_search(
    original: Callable[..., Any], self: Any, prompts: Any, params: Any, lora_request: Any, priority: Any = None
) -> Any:  # priority: since vLLM 0.33
    """Ranked lists offline: vLLM's own loop loses legal candidates, and knows the built-in backends only."""
    from vllm_static import list_requests
    from vllm_static.request import asked

    if self.llm_engine.input_processor.static_front_end is None:
        return original()
    with refusals(params):
        if (item_request := asked(params)) is None:
            return original(params=compat.beams_by_xgrammar(params))
        inputs = self._preprocess_cmpl(prompts)
        loras = self._lora_request_to_seq(lora_request, len(inputs))
        priorities = None if priority is None else self._priority_to_seq(priority, len(inputs))
        return list_requests.offline(self, inputs, item_request, params, loras, priorities)


@hook("vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search", when=IMPORTED)
async def _beam_search_online(
    original: Callable[..., Any], self: Any, prompt: Any, request_id: str, params: Any, lora_request: Any,
    trace_headers: Any, session_id: Any, priority: int = 0,
) -> AsyncGenerator[Any, None]:  # fmt: skip # priority: since vLLM 0.33
    """Ranked lists over HTTP."""
    from vllm_static import list_requests
    from vllm_static.request import asked

    way: Any = original
    with refusals(params):
        if self.engine_client.input_processor.static_front_end and (item_request := asked(params)) is not None:
            options = {"trace_headers": trace_headers, "session_id": session_id, "priority": priority}
            options["lora_request"] = lora_request
            way = partial(list_requests.online, item_request, self.engine_client, prompt, request_id, params, **options)
        async for output in way():
            yield output


@hook("starlette.requests:Request.json", when=IMPORTED, always=True)
def _parse_body(original: Callable[..., Any], self: Any) -> Any:
    """An HTTP body is judged as soon as it is parsed, before anything is dropped, where our middleware asks for it."""
    from itemset.serving import http_bodies

    return http_bodies.judged(original, self)
