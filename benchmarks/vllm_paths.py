"""Measures the real vLLM engine (model runner V2) without a set, on the device path, on the host path, and with
xgrammar's choice.

python benchmarks/vllm_paths.py --json docs/benchmarks/vllm_paths.json --plot docs/benchmarks/vllm_paths.png

Every figure comes from a fresh process with its own engine: tokens a second, the time of a step and of its sampler, and
the bitmasks that a step makes and copies. Without a GPU the engine runs through Triton's interpreter, where a step is
thousands of times slower than on a GPU: there only the work that one path has and another has not is worth reading, the
bitmasks above all. Sets of 100 and 10,000 items are lists of texts in the request, those of 10^6 are semantic IDs in a
file, which xgrammar cannot take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from choice import make_items

ROOT = Path(__file__).parent.parent
CUDA = torch.cuda.is_available()
KINDS = ("unconstrained", "device", "host", "xgrammar")
LARGEST = {"unconstrained": 10**6, "device": 10**6, "host": 10**6, "xgrammar": 10**4}
LENGTH = 8  # tokens of a semantic ID
ROWS = {
    "tokens_s": "tokens a second",
    "step_ms": "step, ms",
    "sampler_ms": "of it the sampler, ms",
    "bitmask_us": "of it making bitmasks on the host, µs",
    "bitmask_bytes": "bitmask bytes copied a step",
    "waits": "steps whose sampling must wait for the host",
}
Answer = dict[str, Any]


def environment(v2: bool) -> dict[str, str]:
    """v2: whether vLLM's model runner V2 runs, without a GPU through Triton's interpreter."""
    added = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if v2 else "0",
    }
    if not CUDA:
        added["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if not CUDA and v2:
        added |= {
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests" / "interpreter", ROOT / "tests", ROOT))),
        }
    return os.environ | added


def model_path() -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    from models import cached_tiny_llama

    return str(cached_tiny_llama())


def semantic_ids(items: int, path: Path, length: int = LENGTH) -> str:
    import itemset

    codes = np.random.default_rng(0).integers(100, 2_000, (items, length), dtype=np.uint16)
    itemset.build(codes).save(path)
    return str(path)


def engine(kind: str, model: str, batch: int, file: str | None) -> Any:
    from vllm import LLM

    arguments: dict[str, Any] = {"structured_outputs_config": {"backend": "xgrammar"}}
    if kind in ("device", "host"):
        options: dict[str, Any] = {"item_set_path": kind, "item_set_kernels": "triton"}
        if file:
            options["item_sets"] = {"ids": file}
        arguments = {"structured_outputs_config": {"backend": "static"}, "additional_config": options}
    return LLM(model=model, enforce_eager=not CUDA, max_model_len=256, max_num_seqs=batch, dtype="auto", **arguments)


def parameters(kind: str, items: int, registered: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if kind == "unconstrained":
        return SamplingParams(temperature=1, max_tokens=LENGTH + 1, ignore_eos=True)
    if registered:
        return SamplingParams(temperature=1, max_tokens=LENGTH + 1, extra_args={"item_set": "ids"})
    texts = StructuredOutputsParams(choice=make_items(items))
    return SamplingParams(temperature=1, max_tokens=64, structured_outputs=texts)


class Watch:
    """Adds up, from `start` on, the time of some functions of vLLM's, and counts what a grammar brings with it."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

        self.seconds: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._around(GPUModelRunner, "sample", "sampler", wait=True)
        self._around(StructuredOutputManager, "grammar_bitmask", "bitmask")
        self._around(StructuredOutputsWorker, "apply_grammar_bitmask", "apply", count=self._count_bytes)
        self._around(Scheduler, "schedule", "schedule", count=self._count_step)

    def _around(
        self, owner: type, name: str, what: str, *, wait: bool = False, count: Callable[..., None] | None = None
    ) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if wait and CUDA:
                torch.cuda.synchronize()
            started = time.perf_counter()
            result = original(*args, **kwargs)
            if wait and CUDA:
                torch.cuda.synchronize()
            self.seconds[what] += time.perf_counter() - started
            if count:
                count(result, *args)
            return result

        setattr(owner, name, timed)

    def _count_bytes(self, _: Any, worker: Any, logits: Any, batch: Any, requests: Any, bitmask: np.ndarray) -> None:
        self.counts["bytes"] += bitmask.nbytes

    def _count_step(self, output: Any, *_: Any) -> None:
        if output.total_num_scheduled_tokens:
            self.counts["steps"] += 1
            self.counts["waits"] += bool(output.has_structured_output_requests)

    def start(self) -> None:
        self.seconds.clear()
        self.counts.clear()


def measure(kind: str, model: str, batch: int, items: int, rounds: int, file: str | None) -> Answer:
    llm = engine(kind, model, batch, file)
    params = parameters(kind, items, file is not None)
    prompts = [f"prompt {i}" for i in range(batch)]
    llm.generate(prompts, params, use_tqdm=False)  # the set is built, the kernels are compiled
    started = time.perf_counter()
    tokens = 0
    for _ in range(rounds):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    elapsed = time.perf_counter() - started
    watch = Watch()
    watch.start()
    again = time.perf_counter()
    for _ in range(rounds):
        llm.generate(prompts, params, use_tqdm=False)
    watched, steps = time.perf_counter() - again, watch.counts["steps"]
    return {
        "tokens_s": tokens / elapsed,
        "step_ms": watched / steps * 1e3,
        "sampler_ms": watch.seconds["sampler"] / steps * 1e3,
        "bitmask_us": watch.seconds["bitmask"] / steps * 1e6,
        "bitmask_bytes": watch.counts["bytes"] / steps,
        "waits": watch.counts["waits"] / steps,
    }


def in_process(script: str, *task: Any, v2: bool = True) -> Answer:
    """What `script --task` prints last, in a process of its own."""
    command = [sys.executable, script, "--task", json.dumps(task)]
    run = subprocess.run(command, env=environment(v2), capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{task} failed:\n{run.stderr[-3000:]}")
    answer: Answer = json.loads(run.stdout.splitlines()[-1])
    return answer


def table(results: list[Answer]) -> str:
    lines = ["| | batch | items | " + " | ".join(KINDS) + " | device / unconstrained |", "|---|--:|--:|" + "--:|" * 5]
    for key, title in ROWS.items():
        for batch, items in sorted({(r["batch"], r["items"]) for r in results}):
            row = {r["kind"]: r[key] for r in results if (r["batch"], r["items"]) == (batch, items)}
            cells = [f"{row[kind]:,.2f}" if kind in row else "" for kind in KINDS]
            ratio = row["device"] / row["unconstrained"] if row["unconstrained"] else 0
            lines.append(f"| {title} | {batch} | {items:,} | {' | '.join(cells)} | {f'{ratio:.3f}' if ratio else ''} |")
    return "\n".join(lines)


def plot(results: list[Answer], path: Path) -> None:
    import matplotlib.pyplot as plt

    batches = sorted({r["batch"] for r in results})
    figure, axes = plt.subplots(1, len(batches), figsize=(4 * len(batches), 3.5), squeeze=False)
    for axis, batch in zip(axes[0], batches, strict=True):
        for kind in KINDS:
            points = sorted((r["items"], r["sampler_ms"]) for r in results if (r["kind"], r["batch"]) == (kind, batch))
            axis.plot(*zip(*points, strict=True), marker="o", label=kind)
        axis.set(xscale="log", ylim=0, xlabel="items", ylabel="sampler, ms a step", title=f"batch {batch}")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: a tiny random Llama, made on the spot")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--items", type=float, nargs="+", default=[100, 10**4, 10**6])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        print(json.dumps(measure(*json.loads(arguments.task))))
        return
    model = arguments.model or model_path()
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for items in map(int, arguments.items):
            file = semantic_ids(items, Path(directory) / f"{items}.itemset") if items > 10**4 else None
            for batch in arguments.batches:
                for kind in KINDS:
                    if items <= LARGEST[kind]:
                        answer = in_process(__file__, kind, model, batch, items, arguments.rounds, file)
                        results.append({"kind": kind, "batch": batch, "items": items} | answer)
                        print(results[-1], file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name() if CUDA else "CPU, Triton's interpreter"
    print(f"{device}, {model}\n\n{table(results)}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": device, "results": results}, indent=1) + "\n")
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
