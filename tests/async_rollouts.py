"""Rollouts by a real `AsyncLLM`, in a process of its own: candidates, and sleep, new weights and waking up under load.

python async_rollouts.py MODEL OTHER SET ITEMS: prints JSON. ITEMS: a JSON file of the set's items.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from engine_words import EOS, PROMPT
from engines import FAST

CYCLES = 10


async def rollouts(model: str, other: str, item_set: str) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {"item_sets": {"films": item_set}, "item_set_kernels": "numba"}
    backend = {"backend": "static"}
    args = AsyncEngineArgs(model=model, **FAST, structured_outputs_config=backend, additional_config=options)
    engine = AsyncLLM.from_engine_args(args)
    numbers = iter(range(10**9))

    async def ask(prompt: Any, n: int = 1, **extra: Any) -> list[Any]:
        params = SamplingParams(n=n, max_tokens=20, extra_args={"item_set": "films", **extra})
        async for output in engine.generate(prompt, params, str(next(numbers))):
            last = output
        return last.outputs

    def told(outputs: list[Any]) -> list[Any]:
        return [(list(one.token_ids), one.cumulative_logprob, one.item, one.item_logprobs) for one in outputs]

    tokens = {"prompt_token_ids": PROMPT}
    found: dict[str, Any] = {
        "list": told(await ask(tokens, 4, list=True, item_logprobs=True)),
        "draws": told(await ask("A film: ", 3, draws=True, item_logprobs=True)),
    }
    illegal, answered, going = [], 0, True
    legal = {tuple(item) for item in json.loads(Path(sys.argv[4]).read_text())}

    async def load() -> None:
        nonlocal answered
        while going:
            for one in await ask([[7, 8, 9], "A film: "][answered % 2] and tokens, 2):
                done = one.finish_reason == "stop" and one.token_ids[-1] == EOS
                if one.finish_reason != "abort" and not (done and tuple(one.token_ids[:-1]) in legal):
                    illegal.append(list(one.token_ids))
                answered += one.finish_reason == "stop"

    loads = [asyncio.ensure_future(load()) for _ in range(3)]
    found["cycles"], resident = [], []
    for cycle in range(CYCLES):
        await asyncio.sleep(0.2)
        await engine.sleep(1 + cycle % 2)
        path = model if cycle % 2 else other
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        await engine.wake_up()
        await engine.reset_prefix_cache()
        found["cycles"].append([cycle % 2, told(await ask(tokens, 2, list=True, item_logprobs=True))])
        resident.append((await engine.collective_rpc(resident_bytes))[0])
    going = False
    await asyncio.gather(*loads)
    engine.shutdown()
    return found | {"illegal": illegal, "answered": answered, "resident": resident}


def resident_bytes(worker: Any) -> int:
    return int(Path(f"/proc/{os.getpid()}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(asyncio.run(rollouts(*sys.argv[1:4]))))
