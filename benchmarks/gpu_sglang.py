"""The real SGLang on a bare GPU machine, unpacked from what `gpu_pack_sglang.py` has packed: one start for all ways.

python benchmarks/gpu_sglang.py unpack PACK     make it importable, with .pyc files, the loops in Numba and two sets
python benchmarks/gpu_sglang.py measure         one engine with Qwen3-1.7B's shape and random weights: a row a way

`gpu.py` runs both, in a folder of its own (STATIC_GPU_HOME). A row is a line of JSON. What does not start, or ends
before it has said all, is a row, and the next of `RUNGS` is tried: each asks less of what was built elsewhere.
STATIC_GPU_TINY=1 makes all of it small, for an SGLang that is installed on a CPU.

SGLang's scheduler is a process of its own. A plugin of this benchmark's notes each of its steps there: when, how many
rows, on which path, and whether a CUDA graph was replayed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import gpu_engine
from gpu_engine import CACHE, HOME, MODEL, ROOT, SIZE, TINY, extract, reported, say

BENCHMARKS = Path(__file__).resolve().parent
PLUGIN, NOTES = HOME / "plugin", HOME / "steps.jsonl"
STARTS = 130  # seconds that a start may take
WIDEST = 256  # rows of a list: as many requests as that must fit beside it
DRAWS, DRAW_WIDTH = 8, 16
FEW = 64  # items to draw from: a random model gives those of a large set next to nothing, so that draws take for ever
LOAD: dict[str, Any] = {
    "load_format": "dummy", "dtype": "bfloat16", "context_length": 2_048, "max_running_requests": SIZE.rows[0],
    "mem_fraction_static": 0.6, "chunked_prefill_size": 16_384, "max_prefill_tokens": 16_384,
    "sampling_backend": "pytorch", "bf16_gemm_backend": "torch", "cuda_graph_bs_decode": [1, 64, 256, SIZE.rows[0]],
    "cuda_graph_backend_prefill": "disabled",
}  # fmt: skip
NATIVE = {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}  # norms, activations and rotary embeddings as PyTorch has them
RUNGS: tuple[tuple[dict[str, Any], dict[str, str]], ...] = (  # arguments, and what is added to the environment
    ({"attention_backend": "triton"}, {}),
    ({"attention_backend": "triton"}, NATIVE),
    ({"attention_backend": "triton", "disable_cuda_graph": True}, NATIVE),
    ({"attention_backend": "torch_native", "disable_cuda_graph": True}, NATIVE),
)
if TINY:
    LOAD = {
        "load_format": "dummy", "dtype": "float32", "context_length": 256, "max_running_requests": 16,
        "mem_fraction_static": 0.2, "max_total_tokens": 4_096, "device": "cpu", "sleep_on_idle": True,
    }  # fmt: skip
    RUNGS, WIDEST, DRAWS, DRAW_WIDTH = ((RUNGS[-1][0], {}),), 16, 2, 4
COMMON: dict[str, Any] = {
    "grammar_backend": "static", "skip_server_warmup": True, "log_level": "info", "random_seed": 0,
    "item_sets": {name: str(HOME / f"{name}.itemset") for name in (*(one[0] for one in SIZE.sets), "few")},
    "ranked_list_beams": WIDEST, "ranked_list_limit": WIDEST,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "none": {"ignore_eos": True},
    "device": {"item_set": "items"},
    # More stop tokens than the device path takes, none of them in the set: one start serves both paths.
    "host": {"item_set": "items", "stop_token_ids": list(range(100, 229))},
}
MADE: dict[str, dict[str, Any]] = {"in a step": {}, "by rounds": {"max_passes": 10_000}}
MODELS = "from sglang.srt.models.qwen3 import Qwen3ForCausalLM\n\nEntryClass = Qwen3ForCausalLM\n"


def environment() -> dict[str, str]:
    """What the engine's processes run with."""
    given = dict(os.environ) if TINY else gpu_engine.environment()
    paths = (PLUGIN, BENCHMARKS, ROOT, given.get("PYTHONPATH", ""))
    return given | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)).rstrip(os.pathsep),
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "static_gpu_models",  # else all models are imported
        "SGLANG_JIT_CACHE_DIR": str(HOME / "jit"),  # `gpu_jit.py`
        "SGLANG_CACHE_DIR": str(HOME / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def unpack(pack: Path) -> None:
    gpu_engine.unpack(pack)
    if (pack / CACHE).exists():
        extract(pack / CACHE, HOME)
    make_plugin()
    # What cannot be seeded is compiled by the engine where there is a compiler; where there is none, RUNGS do without.
    subprocess.run([sys.executable, str(BENCHMARKS / "gpu_jit.py"), "seed", str(HOME / "site")], env=environment())


def prepare() -> None:
    """What `unpack` does, where SGLang is installed."""
    make_plugin()
    gpu_engine.make_sets()


def make_plugin() -> None:
    """Let SGLang find `notes`, and a package with the one model."""
    info, models = PLUGIN / "static_gpu_notes-0.dist-info", PLUGIN / "static_gpu_models"
    for folder in (info, models):
        folder.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: static-gpu-notes\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nstatic_gpu_notes = gpu_sglang:notes\n")
    (models / "__init__.py").write_text("")
    (models / "qwen3.py").write_text(MODELS)


def notes() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.process_batch_result", _note)
    # It is 150 MB, to be told that this kernel is not for compute capability 9.
    if importlib.util.find_spec("cutlass") is None:
        target = "sglang.srt.layers.dual_gemm.DualGemm._select_mode"
        HookRegistry.register(target, lambda *_: None, HookType.REPLACE)


def _note(result: Any, scheduler: Any, batch: Any, outcome: Any) -> None:
    runner = getattr(scheduler.tp_worker.model_runner, "decode_cuda_graph_runner", None)
    row = {
        "at": time.perf_counter(),  # one clock for all processes
        "decodes": bool(batch.forward_mode.is_decode()),
        "rows": len(batch.reqs),
        "device": sum(hasattr(one, "item_set") for one in batch.reqs),
        "host": sum(one.grammar is not None for one in batch.reqs),
        "lists": sum(getattr(one, "beam_group", None) is not None for one in batch.reqs),
        "graph": bool(getattr(outcome, "can_run_cuda_graph", False)),
        "captured": list(getattr(runner, "capture_bs", None) or ()),
    }
    with NOTES.open("a") as file:
        print(json.dumps(row), file=file)


def measure() -> None:
    """Try RUNGS in turn, each in a process group of its own, until one has said all that there is to say."""
    for number, (arguments, more) in enumerate(RUNGS):
        NOTES.unlink(missing_ok=True)
        log = HOME / f"engine_{number}.log"
        command = [sys.executable, str(Path(__file__).resolve()), "engine", str(number)]
        with log.open("w") as said:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True,
                env=environment() | more,
            )  # fmt: skip
        timer = threading.Timer(STARTS, _end, [child])
        timer.start()
        done = False
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith('{"way"'):
                print(line, end="", file=sys.stderr)
                continue
            timer.cancel()
            done = done or line.startswith('{"way": "end"')
            print(line, end="", flush=True)
        _end(child)
        timer.cancel()
        text = log.read_text(errors="replace")
        print(text, file=sys.stderr)
        if done:
            return
        why = _why(text)
        say({"way": "start", **arguments, **more, "failed": why})
        if "NVIDIA" in why or "no GPUs" in why:
            break  # there is no card
    sys.exit(1)


def _end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _why(log: str) -> str:
    """The last 300 characters of the error that an engine's process has ended with."""
    errors = re.findall(
        r"^(?:\[[^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception)\b.*(?:\n(?!\[|Traceback).*){0,6})", log, re.M
    )
    deepest = [one for one in errors if "died during initialization" not in one]
    return (deepest or errors or [log])[-1].strip()[-300:]


def engine(number: int) -> None:
    import numpy as np
    import sglang

    import itemset

    items = np.random.default_rng(0).integers(0, SIZE.sets[1][2], (FEW, 3))
    itemset.build(items + SIZE.words).save(HOME / "few.itemset")
    began = time.perf_counter()
    arguments, more = RUNGS[number]
    llm = sglang.Engine(model_path=str(MODEL), **COMMON | LOAD | arguments)
    say({"way": "start", **arguments, **more, "seconds": time.perf_counter() - began})
    steps = Steps()
    for count in SIZE.rows:
        _interleaved(llm, steps, count)
    with reported("greedy"):
        say({"way": "greedy", **_greedy(llm)})
    for width, tokens in SIZE.lists:
        if width <= WIDEST:
            with reported(f"list of {width}"):
                _lists(llm, steps, width, tokens)
    with reported("draws"):
        say({"way": "draws", **_draws(llm, steps)})
    say({"way": "graphs", **steps.summary()})
    with contextlib.suppress(Exception):
        llm.shutdown()
    say({"way": "end"})


class Steps:
    """The scheduler's steps, as the plugin has noted them."""

    def __init__(self) -> None:
        self._read, self._all = 0, list[dict[str, Any]]()

    def new(self) -> list[dict[str, Any]]:
        """Return those since the last call."""
        time.sleep(0.03)  # a step is noted once its answers are on their way
        text = NOTES.read_text() if NOTES.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        found = [json.loads(line) for line in whole[self._read :].splitlines()]
        self._read = len(whole)
        self._all += found
        return found

    def summary(self) -> dict[str, Any]:
        self.new()
        decoding = [one for one in self._all if one["decodes"]]
        return {
            "captured": self._all[-1]["captured"] if self._all else [],
            "decoding steps": len(decoding),
            "by a graph": sum(one["graph"] for one in decoding),
            "rows on the device path": sum(one["device"] for one in self._all),
            "rows on the host path": sum(one["host"] for one in self._all),
        }


def _interleaved(llm: Any, steps: Steps, count: int) -> None:
    """Measure a decoding step with `count` rows of each way, in ms, from result to result: only steps with all rows
    count. The ways take turns, and each is held against no set in the same turn: a machine's own speed drifts."""
    turns: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    rows: dict[str, dict[str, Any]] = {way: {"rows": count} for way in WAYS}
    for turn in range(1 + SIZE.turns):
        for way, words in WAYS.items():
            with reported(way):
                steps.new()
                answers = _answers(llm, count, {"temperature": 1.0, **words})
                noted = [one for one in steps.new() if one["decodes"]]
                row = rows[way]
                if way != "none":
                    row["illegal"] = row.get("illegal", 0) + _illegal("items", answers)
                    row["answers"] = row.get("answers", 0) + len(answers)
                times = [
                    (now["at"] - then["at"]) * 1e3
                    for then, now in pairwise(noted)
                    if then["rows"] == now["rows"] == count
                ]
                row["share of a path"] = {
                    path: sum(one[path] for one in noted) / max(1, sum(one["rows"] for one in noted))
                    for path in ("device", "host")
                }
                row["by a graph"] = sum(one["graph"] for one in noted) / max(1, len(noted))
                if turn and times:  # whatever is compiled or recorded at a first use is over
                    turns[way].append(times)
    for way, of_way in turns.items():
        each = [median(one) for one in of_way]
        none = [median(one) for one in turns["none"]]
        ratios = sorted(one / other for one, other in zip(each, none, strict=False))
        more: dict[str, Any] = {"steps": sum(map(len, of_way))}
        if each and ratios:
            more |= {"ms a step": median(each), "least": min(map(min, of_way)), "of none": median(ratios)}
            more["of none, least and most"] = [ratios[0], ratios[-1]]
        say({"way": way, **rows[way], **more})


def _answers(llm: Any, count: int, words: dict[str, Any]) -> list[list[int]]:
    prompts = [[3 + (i * 31 + j) % 900 for j in range(SIZE.prompt)] for i in range(count)]
    outputs = llm.generate(input_ids=prompts, sampling_params={"max_new_tokens": SIZE.steps, **words})
    return [output["output_ids"] for output in outputs]


def _illegal(name: str, answers: list[list[int]]) -> int:
    """Return how many answers are no items of a set."""
    import itemset

    return int((itemset.load(HOME / f"{name}.itemset").lookup(answers) < 0).sum())


def _greedy(llm: Any) -> dict[str, Any]:
    """Count the answers that both paths give alike where nothing is drawn: all, since all else is the same."""
    count = SIZE.rows[-1]
    device, host = (_answers(llm, count, {"temperature": 0.0, **WAYS[way]}) for way in ("device", "host"))
    return {"of": count, "same": sum(map(list.__eq__, device, host)), "illegal": _illegal("items", device)}


def _ask(llm: Any, tokens: int, number: int, words: dict[str, Any]) -> Any:
    """Request a list or draws. number: which prompt; tokens: its length."""
    prompt = [3 + (number * 97 + j) % 900 for j in range(tokens)]
    params = {"max_new_tokens": 4, "temperature": 1.0, "item_set": "ids", **words}
    return llm.generate(input_ids=prompt, sampling_params=params)["meta_info"]


def _found(info: Any, name: str = "ids") -> dict[str, Any]:
    items = [tuple(one["output_ids"][:3]) for one in info["beam_results"]]
    return {"items": len(items), "distinct": len(set(items)), "illegal": _illegal(name, list(map(list, items)))}


def _lists(llm: Any, steps: Steps, width: int, tokens: int) -> None:
    """Lists in a step and by rounds of requests, in turns: rows with ms, and the items that both have in common."""
    times: dict[str, list[float]] = {made: [] for made in MADE}
    last: dict[str, Any] = {}
    inside = dict.fromkeys(MADE, 0)
    for repeat in range(2 + SIZE.repeats):
        for made, words in MADE.items():
            steps.new()
            began = time.perf_counter()
            last[made] = _ask(llm, tokens, repeat, {"beam_width": width, **words})
            times[made].append((time.perf_counter() - began) * 1e3)
            inside[made] += sum(one["lists"] for one in steps.new())
    ids = {made: {tuple(one["output_ids"]) for one in info["beam_results"]} for made, info in last.items()}
    for made, (first, *later) in times.items():
        say({
            "way": "list", "made": made, "width": width, "prompt": tokens, **_found(last[made]),
            "ms": median(later[-SIZE.repeats :]), "least": min(later), "first, ms": first,
            "proven": last[made].get("proven"), "steps of beams": inside[made],
            "as in a step": len(ids[made] & ids["in a step"]),
        })  # fmt: skip


def _draws(llm: Any, steps: Steps) -> dict[str, Any]:
    tokens = SIZE.lists[0][1]
    steps.new()
    times = list[float]()
    for number in range(2 + SIZE.repeats):
        began = time.perf_counter()
        info = _ask(llm, tokens, number, {"item_set": "few", "draws": DRAWS, "width": DRAW_WIDTH})
        times.append((time.perf_counter() - began) * 1e3)
    exact = all(one["meta_info"]["exact"] for one in info["beam_results"])
    inside = sum(one["lists"] for one in steps.new())
    more = {"ms": median(times[2:]), "first, ms": times[0], "exact": exact, "steps of beams": inside}
    return {"draws": DRAWS, "prompt": tokens, **_found(info, "few"), **more}


ACTIONS: dict[str, Callable[[], Any]] = {
    "unpack": lambda: unpack(Path(sys.argv[2])),
    "sets": prepare,
    "measure": measure,
    "engine": lambda: engine(int(sys.argv[2])),
}

if __name__ == "__main__":
    sys.exit(ACTIONS[sys.argv[1]]())
