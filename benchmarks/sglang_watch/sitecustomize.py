"""Makes SGLang's scheduler say in its log what each step spends on constraints: for `sglang_paths.py`."""

from __future__ import annotations

import os
import runpy
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt

from itemset.serving import hooks

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    runpy.run_path(str(Path(__file__).parents[2] / "tests" / "sglang" / "cpu" / "sitecustomize.py"))

_spent: Counter[str] = Counter()

TIMED = {
    "sglang.srt.model_executor.model_runner:ModelRunner._preprocess_logits": "mask",
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor._accept_grammar_tokens": "accept",
    "sglang_static.processor:ItemSetSampler.stage": "stage",
}


def _timed(what: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            _spent[what] += (time.perf_counter() - started) * 1e6

    return around


def _step(original: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, batch, *args, **kwargs)
    delayed = getattr(result, "delay_sample_func", None) is not None
    decoding = batch is not None and batch.forward_mode.is_decode()
    print(f"watch decoding={int(decoding)} delayed={int(delayed)} us={sum(_spent.values()):.1f}", flush=True)
    _spent.clear()
    return result


for _hook, _what in TIMED.items():
    wrapt.register_post_import_hook(
        lambda _, hook=_hook, what=_what: hooks.wrap(hook, _timed(what)), _hook.partition(":")[0]
    )


wrapt.register_post_import_hook(
    lambda _: hooks.wrap("sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation", _step),
    "sglang.srt.managers.scheduler",
)
