"""Candidates for a trainer through `LLM.generate` and `AsyncLLM.generate`: a list or draws, each item an output.

SamplingParams(n=16, extra_args={"item_set": "films", "list": True}), or "draws": True.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from itemset.serving.hooks import IMPORTED
from itemset.serving.request import wants_candidates
from vllm_static.compat import hook
from vllm_static.request_hooks import refusals


@hook("vllm.entrypoints.llm:LLM.generate", why="lists and draws, each item an output", when=IMPORTED)
def generate(
    original: Callable[..., Any], self: Any, prompts: Any, sampling_params: Any, lora_request: Any, priority: Any,
    tokenization_kwargs: Any,
) -> Any:  # fmt: skip
    """Samples of other prompts of the same call are made by vLLM, after them."""
    given = sampling_params if isinstance(sampling_params, list | tuple) else [sampling_params]
    if self.llm_engine.input_processor.static_front_end is None or not any(map(wanted, given)):
        return original()
    from vllm_static import list_requests
    from vllm_static.request import asked_of_generate

    alone = not isinstance(prompts, list | tuple) or (len(prompts) > 0 and isinstance(prompts[0], int))
    prompts = [prompts] if alone else list(prompts)
    each = list(self._params_to_seq(sampling_params, len(prompts)))
    loras = self._lora_request_to_seq(lora_request, len(prompts))
    priorities = self._priority_to_seq(priority, len(prompts))

    def of(values: Any, chosen: list[int]) -> list[Any]:
        return [values[i] for i in chosen]

    with refusals():
        asked = [asked_of_generate(one) for one in each]
        ours = [i for i, one in enumerate(asked) if one is not None]
        inputs = self._preprocess_cmpl(of(prompts, ours), tokenization_kwargs)
        options = {"loras": of(loras, ours), "priorities": None if priority is None else of(priorities, ours)}
        found = list_requests.candidates(self, inputs, of(asked, ours), of(each, ours), **options)
    outputs = dict(zip(ours, found, strict=True))
    if others := [i for i in range(len(prompts)) if i not in outputs]:
        more: dict[str, Any] = {"lora_request": of(loras, others)} if lora_request is not None else {}
        more |= {"priority": of(priorities, others)} if priority is not None else {}
        samples = original(prompts=of(prompts, others), sampling_params=of(each, others), **more)
        outputs |= zip(others, samples, strict=True)
    return [outputs[i] for i in range(len(prompts))]


async def online(client: Any, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
    """What `AsyncLLM.generate` answers."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    from vllm_static import list_requests
    from vllm_static.request import asked_of_generate

    with refusals():
        request = asked_of_generate(params)
        assert request is not None
        if not (isinstance(prompt, dict) and "prompt_token_ids" in prompt):
            parsed = parse_model_prompt(client.model_config, prompt)
            (prompt,) = await client.renderer.render_cmpl_async([parsed])
        async for output in list_requests.online(request, client, prompt, request_id, params, **options):
            yield output


def wanted(params: Any) -> bool:
    """Whether parameters ask for candidates."""
    return wants_candidates(getattr(params, "extra_args", None))
