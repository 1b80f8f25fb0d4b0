"""The hooks by which a request with an item set passes vLLM's front end, of a server or offline."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from itemset.errors import ItemSetError
from itemset.serving import metrics
from itemset.serving.config import start_up
from itemset.serving.front import http_bodies
from itemset.serving.front.beside import at_once
from itemset.serving.front.request import wants_candidates
from itemset.serving.front.request_fields import REFERENCE, SLATE, STRUCTURED
from itemset.serving.hooks import IMPORTED, Later
from vllm_static import compat
from vllm_static.compat import hook
from vllm_static.front import answers

if TYPE_CHECKING:
    from vllm_static.front import front_end as front_ends
    from vllm_static.front import http, list_requests
    from vllm_static.front import request as requests
else:
    front_ends, http = Later("vllm_static.front.front_end"), Later("vllm_static.front.http")
    list_requests, requests = Later("vllm_static.front.list_requests"), Later("vllm_static.front.request")
exceptions, sampling_params = Later("vllm.exceptions"), Later("vllm.sampling_params")


@hook("vllm.v1.engine.input_processor:InputProcessor.__init__", always=True)
def _input_processor_init(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
    """Item sets are opened and checked once a front end, before the engine starts."""
    original()
    self.static_front_end = None
    if compat.is_ours(vllm_config):
        # Knows the built-in backends only: constraints without sets are validated as xgrammar's.
        self.structured_outputs_config = dataclasses.replace(self.structured_outputs_config, backend="xgrammar")
        with start_up():
            if self.tokenizer is None:
                raise ValueError("the static backend needs the model's tokenizer: leave out skip_tokenizer_init")
            self.static_front_end = front_ends.FrontEnd(vllm_config, self.tokenizer)


@contextlib.contextmanager
def refusals(params: Any = None) -> Iterator[None]:
    """What is wrong with an item set becomes vLLM's own error for one bad request, HTTP 400, counted. params: the
    request's, or the request; its slate or its structured outputs are at fault if no other field is."""
    try:
        with metrics.refusals():
            yield
    except ItemSetError as error:
        own = REFERENCE if getattr(params, STRUCTURED, None) is None else STRUCTURED
        own = SLATE if requests.asks_slate(params) else own
        raise exceptions.VLLMValidationError(str(error), parameter=getattr(error, "param", None) or own) from error


@hook("vllm.v1.engine.input_processor:InputProcessor.process_inputs", always=True)
def _process_inputs(original: Callable[..., Any], self: Any, prompt: Any, params: Any, resumable: bool = False) -> Any:
    """The item set is attached to its request: every request passes here, with its prompt's length known."""
    front_end, item_request, told = self.static_front_end, None, getattr(params, answers.TOLD, None)
    if isinstance(params, sampling_params.SamplingParams):
        with refusals(params):
            if not front_end and requests.names_sets(params):  # it would be ignored
                flags = "--structured-outputs-config.backend static and --item-set"
                raise ItemSetError(f"this engine has no item sets: start it with {flags}")
            if front_end and (judged := requests.asked(params)) is not None:
                if resumable:  # whose parts after the first vLLM puts into it, past its set
                    raise ItemSetError("a prompt that is streamed takes no item set: send the whole prompt at once")
                if judged.made is None:
                    judged, prompt = at_once(front_end.healed_prompt(judged, prompt, here=True))
                params = requests.put(params, item_request := front_end.pinned(judged))
    if item_request is None:
        return original(params=params)
    if self.model_config.is_diffusion:
        raise exceptions.VLLMValidationError("Item sets are not supported for diffusion language models.")
    given = copy.copy(params)
    if not item_request.after or item_request.choice is not None:
        given.structured_outputs = None  # vLLM knows no such: `attach` puts its own
    request = original(prompt=prompt, params=given)
    prompt_tokens = len(request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids)
    with refusals(params):
        rendered = prompt if isinstance(prompt, dict) and "type" in prompt else {}
        if item_request.after and (request.prompt_embeds is not None or (request.mm_features and not rendered)):
            need = "a prompt of tokens, or one with images that vLLM has rendered"
            raise ItemSetError(f"a list after a thought needs {need}: send one, or omit list_after")
        item_request = front_end.pinned(item_request, request.prompt_token_ids or ())
        expecting = front_end.attach(item_request, request.sampling_params, prompt_tokens, rendered)
        setattr(request.sampling_params, answers.EXPECTED, lambda request: (expecting(request), told))
    return request


@hook("vllm.v1.engine.async_llm:AsyncLLM.generate")
def _generate(
    original: Callable[..., Any], self: Any, prompt: Any, sampling_params: Any, request_id: str, lora_request: Any,
    trace_headers: Any, session_id: Any = None, priority: int = 0,
) -> Any:  # fmt: skip
    """A server's request, judged; sets are made beside the event loop. Lists and draws, each item an output."""
    if not self.input_processor.static_front_end:
        return original()
    options = {"lora_request": lora_request, "trace_headers": trace_headers, "session_id": session_id}
    options["priority"] = priority
    if wants_candidates(getattr(sampling_params, "extra_args", None)):
        return _candidates(self, prompt, sampling_params, request_id, **options)
    with refusals(sampling_params):
        params = http.with_item_set(sampling_params)
        if (item_request := requests.asked(params)) is None:
            return original(sampling_params=params)
    return _prepared(original, self, item_request, prompt, copy.copy(params), answers.noting(), **options)


async def _prepared(
    original: Callable[..., Any], client: Any, asked: Any, prompt: Any, params: Any, note: Callable[..., Any],
    **options: Any,
) -> Any:  # fmt: skip
    """Yield a request's answers, once its set is made. options: of the request, for a list after its thought."""
    front_ends.follow(client)  # without a server nobody has begun to
    front_end = client.input_processor.static_front_end
    with refusals(params):
        asked, prompt = await front_end.healed_prompt(asked, prompt)
        words = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
        params = requests.put(params, await front_end.prepare(asked, words if isinstance(words, list | str) else None))
    told: dict[int, Any] = {}
    setattr(params, answers.TOLD, told)
    async with aclosing(original(sampling_params=params, prompt=prompt)) as results:
        async for result in results:
            with refusals(params):
                await list_requests.with_list(client, result, told, **options)
            yield note(result, told)


async def _candidates(client: Any, prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
    """Yield a list or draws, each item an output."""
    with refusals():
        request = requests.asked_of_generate(params)
        assert request is not None
        if not (isinstance(prompt, dict) and "type" in prompt):
            from vllm.renderers.inputs import preprocess

            parsed = preprocess.parse_model_prompt(client.model_config, prompt)
            (prompt,) = await client.renderer.render_cmpl_async([parsed])
        yield await list_requests.online(request, client, prompt, request_id, **options)


@hook("vllm.entrypoints.llm:LLM.generate", why="lists and draws, each item an output", when=IMPORTED)
def _generate_offline(
    original: Callable[..., Any], self: Any, prompts: Any, sampling_params: Any, lora_request: Any, priority: Any,
    tokenization_kwargs: Any, mm_processor_kwargs: Any,
) -> Any:  # fmt: skip
    """SamplingParams(n=16, extra_args={"item_set": "films", "list": True}), or "draws": True. Samples of other prompts
    of the same call are made by vLLM, after them."""
    given = sampling_params if isinstance(sampling_params, list | tuple) else [sampling_params]
    wanted = any(wants_candidates(getattr(one, "extra_args", None)) for one in given)
    if self.llm_engine.input_processor.static_front_end is None or not wanted:
        return original()
    alone = not isinstance(prompts, list | tuple) or (len(prompts) > 0 and isinstance(prompts[0], int))
    prompts = [prompts] if alone else list(prompts)
    each = list(self._params_to_seq(sampling_params, len(prompts)))
    loras = self._lora_request_to_seq(lora_request, len(prompts))
    priorities = self._priority_to_seq(priority, len(prompts))

    def of(values: Any, chosen: list[int]) -> list[Any]:
        return [values[i] for i in chosen]

    with refusals():
        asked = [requests.asked_of_generate(one) for one in each]
        ours = [i for i, one in enumerate(asked) if one is not None]
        inputs = self._preprocess_cmpl(of(prompts, ours), tokenization_kwargs, mm_processor_kwargs)
        found = list_requests.candidates(self, inputs, of(asked, ours), of(loras, ours), of(priorities, ours))
    outputs = dict(zip(ours, found, strict=True))
    if others := [i for i in range(len(prompts)) if i not in outputs]:
        more = {"lora_request": of(loras, others), "priority": of(priorities, others)}
        samples = original(prompts=of(prompts, others), sampling_params=of(each, others), **more)
        outputs |= zip(others, samples, strict=True)
    return [outputs[i] for i in range(len(prompts))]


@hook("vllm.entrypoints.common.offline:OfflineInferenceMixin._run_engine", when=IMPORTED)
def _run_engine(original: Callable[..., Any], self: Any) -> Any:
    """Offline, lists after thoughts, whichever method of `LLM` has asked for them."""
    with refusals():
        return list_requests.with_lists(self, original())


@hook("vllm.entrypoints.serve.engine.serving:BaseServing._check_model", when=IMPORTED)
async def _check_model(original: Callable[..., Any], self: Any, request: Any) -> Any:
    """The fields of a request: every endpoint passes here, before vLLM makes parameters, without most of them."""
    if hasattr(request, "model_extra"):
        try:
            with refusals(request):
                http.judge_request(request)
                if (front_end := compat.front_end_of(self)) is not None:
                    await http.make_sets(front_end)
        except exceptions.VLLMValidationError as error:  # not every endpoint expects one to be raised here
            return self.create_error_response(error)
    return await original()


@hook("vllm.entrypoints.llm:LLM.beam_search", when=IMPORTED)
def _beam_search(
    original: Callable[..., Any], self: Any, prompts: Any, params: Any, lora_request: Any, priority: Any = None
) -> Any:  # priority: since vLLM 0.33
    """Ranked lists offline: vLLM's own loop loses legal candidates, and knows the built-in backends only. A plugin that
    was there first may have put its own there, above the class that has vLLM's."""
    if self.llm_engine.input_processor.static_front_end is None:
        return original()
    with refusals(params):
        if (item_request := requests.asked(params)) is None:
            return original(params=compat.beams_by_xgrammar(params))
        inputs = self._preprocess_cmpl(prompts)
        loras = self._lora_request_to_seq(lora_request, len(inputs))
        priorities = self._priority_to_seq(priority, len(inputs))
        return list_requests.offline(self, inputs, item_request, params, loras, priorities)


@hook("vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search", when=IMPORTED)
async def _beam_search_online(
    original: Callable[..., Any], self: Any, prompt: Any, request_id: str, params: Any, lora_request: Any,
    trace_headers: Any, session_id: Any, priority: int = 0,
) -> Any:  # fmt: skip # priority: since vLLM 0.33
    """Ranked lists over HTTP."""
    request_id = f"{request_id}-{http_bodies.body().prompts}"  # vLLM gives all prompts of a body the same
    note = answers.noting()
    with refusals(params):
        if self.engine_client.input_processor.static_front_end:
            params = http.with_item_set(params)
            if (item_request := requests.asked(params)) is not None:
                options = {"trace_headers": trace_headers, "session_id": session_id, "priority": priority}
                options["lora_request"] = lora_request
                yield note(await list_requests.online(item_request, self.engine_client, prompt, request_id, **options))
                return
        async for result in original():
            yield note(result)


@hook("starlette.requests:Request.json", when=IMPORTED, always=True)
def _parse_body(original: Callable[..., Any], self: Any) -> Any:
    """An HTTP body is judged as soon as it is parsed, before anything is dropped, where our middleware asks for it."""
    return http_bodies.judged(hook, original, self)
