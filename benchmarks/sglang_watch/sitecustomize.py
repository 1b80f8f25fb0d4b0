"""Makes SGLang's scheduler say in its log what each step spends on constraints: for `sglang_paths.py`."""

from __future__ import annotations

import os
import runpy
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    hooks.after_import(_hook.partition(":")[0], lambda hook=_hook, what=_what: hooks.wrap(hook, _timed(what)))


def _watch_worker() -> None:
    """Around the plugin's own hook, which `wrap` would take for this one."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    forward = TpModelWorker.forward_batch_generation
    TpModelWorker.forward_batch_generation = lambda *args, **kwargs: _step(forward, *args, **kwargs)


hooks.after_import("sglang.srt.managers.scheduler", _watch_worker)
