"""The real vLLM on a bare GPU machine, unpacked from what `gpu_pack.py` has packed: one start for all ways.

python benchmarks/gpu_engine.py unpack PACK     make it importable, with .pyc files, the loops in Numba and two sets
python benchmarks/gpu_engine.py measure         one engine with Qwen3-1.7B's shape and random weights: a row a way
python benchmarks/gpu_engine.py measure_fp8     the same engine's lists with a KV cache of 8 bits
python benchmarks/gpu_engine.py measure_windows and those of layers with windows beside full ones, all with sinks
python benchmarks/gpu_engine.py measure_states  and those of layers with states beside full attention

`gpu.py` runs both, with the environment of `environment`. A row is a line of JSON. STATIC_GPU_HOME names another
folder, and STATIC_GPU_TINY=1 makes all of it small, for a vLLM that is installed on a CPU.
"""

from __future__ import annotations

import compileall
import contextlib
import json
import lzma
import os
import subprocess
import sys
import tarfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

CACHE = "triton.tar.xz"
ROOT = Path(__file__).resolve().parents[1]
HOME = Path(os.environ.get("STATIC_GPU_HOME", "/tmp/static_gpu"))
SITE, MODEL, TRITON_CACHE = HOME / "site", HOME / "model", HOME / "triton"


@dataclass(frozen=True)
class Size:
    """What is measured. sets: by name, codes of an item, codes of a level, and how many ranges of tokens levels have.

    lists: width, and tokens of the prompt.
    """

    vocabulary: int = 151_936
    words: int = 20_000
    sets: tuple[tuple[str, int, int, int], ...] = (("items", 8, 2_048, 1), ("ids", 3, 8_192, 3))
    count: int = 1_000_000
    model: tuple[int, int, int, int, int, int] = (2_048, 6_144, 28, 16, 8, 128)  # Qwen3-1.7B's
    rows: tuple[int, ...] = (512, 64)
    prompt: int = 16
    steps: int = 8
    turns: int = 8  # of the ways
    repeats: int = 5  # of half of a list's measurements
    lists: tuple[tuple[int, int], ...] = ((64, 1_000), (256, 1_000), (256, 100), (5_000, 1_000))


TINY = os.environ.get("STATIC_GPU_TINY") == "1"
SIZE = Size()
LOAD: dict[str, Any] = {
    "load_format": "dummy", "max_model_len": 2_048, "max_num_seqs": SIZE.rows[0], "max_num_batched_tokens": 16_384,
    "gpu_memory_utilization": 0.6, "enable_prefix_caching": False, "dtype": "bfloat16",
    "attention_backend": "FLASH_ATTN",
    "compilation_config": {
        "mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 64, 256, SIZE.rows[0], 1_024],
    },
}  # fmt: skip
if TINY:
    sets = (("items", 8, 20, 1), ("ids", 3, 40, 3))
    SIZE = Size(2_000, 1_000, sets, 3_000, (64, 64, 2, 2, 1, 32), (4,), 16, 8, 2, 1, ((4, 20),))
    LOAD = {"load_format": "dummy", "max_model_len": 256, "max_num_seqs": 8, "dtype": "float32", "enforce_eager": True}


def environment() -> dict[str, str]:
    """What every step of `gpu.py` runs with."""
    given = {
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, ROOT, ROOT / "tests", os.environ.get("PYTHONPATH", "")))),
        "TRITON_CACHE_DIR": TRITON_CACHE, "NUMBA_CACHE_DIR": HOME / "numba", "HF_HUB_OFFLINE": 1,
        "VLLM_ENABLE_V1_MULTIPROCESSING": 0, "VLLM_USE_V2_MODEL_RUNNER": 1, "VLLM_NO_USAGE_STATS": 1,
        "VLLM_USE_FLASHINFER_SAMPLER": 0, "VLLM_USE_BREAKABLE_CUDAGRAPH": 1, "PYTHONUNBUFFERED": 1,
    }  # fmt: skip
    return os.environ | {name: str(value).rstrip(os.pathsep) for name, value in given.items()}


def unpack(pack: Path) -> None:
    """Do all that no measurement has to wait for, on as many cores as there are."""
    SITE.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        done = [pool.submit(extract, path, SITE) for path in pack.glob("*.tar.xz") if path.name != CACHE]
        install(pack / "wheels", SITE)
        for one in done:
            one.result()
    _entry_points()
    compiled = subprocess.Popen([sys.executable, __file__, "bytecode"])
    sets = subprocess.Popen([sys.executable, __file__, "sets"], env=environment())
    loops = subprocess.Popen(
        [sys.executable, "-c", "from itemset.serving.warm_up import compile_all; compile_all()"], env=environment()
    )
    if sum(abs(one.wait()) for one in (compiled, sets, loops)):  # all of them are waited for
        raise SystemExit("what an engine needs is not ready: see above")


def install(wheels: Path, site: Path) -> None:
    options = ["-q", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *options, *sorted(map(str, wheels.glob("*.whl")))]
    subprocess.run(command, check=True)


def extract(archive: Path, where: Path) -> None:
    with lzma.open(archive) as packed, tarfile.open(fileobj=packed) as members:
        members.extractall(where, filter="data")


def _entry_points() -> None:
    """Let vLLM find this project's plugins without an installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = SITE / "static_backend-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: static-backend\nVersion: 0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


def make_sets() -> None:
    """Build both sets, and a folder with the model's configuration and a tokenizer of words."""
    import numpy as np
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    import itemset

    HOME.mkdir(parents=True, exist_ok=True)
    for name, length, codes, ranges in SIZE.sets:
        items = np.random.default_rng(0).integers(0, codes, (SIZE.count, length))
        items += SIZE.words + codes * (np.arange(length) % ranges)
        itemset.build(items).save(HOME / f"{name}.itemset")
    words = {f"w{i}": i for i in range(SIZE.words)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2").save_pretrained(MODEL)
    hidden, inner, layers, heads, kv_heads, head = SIZE.model
    Qwen3Config(
        vocab_size=SIZE.vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head, tie_word_embeddings=True,
        eos_token_id=1,
        architectures=["Qwen3ForCausalLM"], dtype="bfloat16", max_position_embeddings=4_096,
    ).save_pretrained(MODEL)  # fmt: skip


def measure() -> None:
    llm = _started()
    ways = {
        "none": {}, "device": {}, "narrow": {"narrow": True}, "children": {"children": True},
        "narrow, children": {"narrow": True, "children": True}, "host": {"host": True},
    }  # fmt: skip
    for count in SIZE.rows:
        _interleaved(llm, ways, count)
    for width, tokens in SIZE.lists:
        _both_ways(llm, width, tokens)
        with reported(f"list of {width}"), switched(llm, graphs=not TINY):
            more = {"without_end": True}  # a pass less
            say({"way": "list", "width": width, "prompt": tokens, **more, **_lists(llm, width, tokens, more)})
    say({"way": "trials", **_agreeing(llm, ways)})
    if not TINY:  # at the end: a profiler that has run once slows down what comes after it
        _profiled(llm, ways)


def measure_fp8() -> None:
    _beside_rounds(_started(kv_cache_dtype="auto" if TINY else "fp8"))  # a CPU's attention makes no lists of the other


def measure_windows() -> None:
    """Measure a shape like gpt-oss's: a window of 128 tokens in every other layer, and a sink in each head."""
    import torch
    from vllm.v1.attention.backends import cpu_attn, flash_attn

    impl: Any = cpu_attn.CPUAttentionBackendImpl if TINY else flash_attn.FlashAttentionImpl
    init = impl.__init__

    def with_sinks(self: Any, num_heads: int, *args: Any, **given: Any) -> None:
        with torch.device("cpu" if TINY else "cuda"):
            init(self, num_heads, *args, **given | {"sinks": torch.linspace(-1, 4, num_heads, dtype=torch.bfloat16)})

    impl.__init__ = with_sinks
    kinds = ["sliding_attention", "full_attention"] * (SIZE.model[2] // 2)
    windows = {"layer_types": kinds, "sliding_window": 16 if TINY else 128, "use_sliding_window": True}
    _beside_rounds(_started(hf_overrides={"architectures": ["MistralForCausalLM"], **windows}))


def measure_states() -> None:
    """Measure a shape like Qwen3.5's: three layers of the gated delta rule beside one of attention."""
    from transformers import Qwen3NextConfig

    hidden, inner, layers, heads, kv_heads, head = SIZE.model
    folder, own = HOME / "states", 64 if TINY else 128  # of the rule's keys and values
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * max(layers // 4, 1)
    Qwen3NextConfig(
        vocab_size=SIZE.vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=len(kinds),
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head, layer_types=kinds, num_experts=2,
        num_experts_per_tok=2, moe_intermediate_size=inner // 2, shared_expert_intermediate_size=inner // 2,
        linear_num_key_heads=heads, linear_num_value_heads=2 * heads, linear_key_head_dim=own,
        linear_value_head_dim=own, eos_token_id=1,
        architectures=["Qwen3NextForCausalLM"], dtype="bfloat16", max_position_embeddings=4_096,
    ).save_pretrained(folder)  # fmt: skip
    _beside_rounds(_started(hf_config_path=str(folder), dtype="bfloat16", enable_prefix_caching=False))


def _beside_rounds(llm: Any) -> None:
    for width, tokens in SIZE.lists[:2]:
        _both_ways(llm, width, tokens)
        with reported(f"rounds of {width}"):
            say({"way": "rounds", "width": width, "prompt": tokens, **_by_rounds(llm, width, tokens)})


def _started(**load: Any) -> Any:
    began = time.perf_counter()
    llm, backend = _engine(**load)
    say({"way": "start", "seconds": time.perf_counter() - began, "attention": backend})
    if not TINY:  # a CPU multiplies by packed copies of its weights
        _spread(llm)
    return llm


def _both_ways(llm: Any, width: int, tokens: int) -> None:
    """Measure lists as graphs, and pass by pass."""
    for graphs in (False,) if TINY else (True, False):
        with reported(f"list of {width}"), switched(llm, graphs=graphs):
            say({"way": "list", "width": width, "prompt": tokens, "graph": graphs, **_lists(llm, width, tokens)})


def _by_rounds(llm: Any, width: int, tokens: int) -> dict[str, Any]:
    """Count the items that lists in a step have in common with those by rounds of requests, and compare scores."""
    common, apart = list[float](), list[float]()
    for number in range(3):
        ways = ({"width": width}, {"width": width, "max_passes": 10_000})
        made, asked = (_list_of(llm, width, tokens, number, way).sequences for way in ways)
        items, others = ({tuple(one.tokens[tokens:]) for one in found} for found in (made, asked))
        common.append(len(items & others) / len(others))
        apart += [abs(one.cum_logprob - other.cum_logprob) for one, other in zip(made, asked, strict=True)]
    return {"in common with rounds": min(common), "largest difference of scores": max(apart)}


def _spread(llm: Any) -> None:
    """Give the model weights with which a prompt matters: vLLM's own random ones make all tokens alike."""
    import torch

    with torch.no_grad():
        for parameter in _runner(llm).model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    _sets(llm).narrow.refresh()


def _agreeing(llm: Any, ways: dict[str, dict[str, bool]]) -> dict[str, Any]:
    """Count the answers that each way samples as the mask does with the same seeds (all, but for rounding), and the
    items that a graph's list has in common with the list made pass by pass."""
    from vllm import SamplingParams

    prompts: Any = [{"prompt_token_ids": [3 + i, 4 + i]} for i in range(SIZE.rows[-1])]
    given: dict[str, Any] = {"max_tokens": SIZE.steps, "extra_args": {"item_set": "items"}, "detokenize": False}
    answers = {}
    for way, switches in ways.items():
        if way != "none":
            with switched(llm, **switches):
                params = [SamplingParams(temperature=1.0, seed=i, **given) for i in range(len(prompts))]
                outputs = llm.generate(prompts, params, use_tqdm=False)
                answers[way] = [tuple(one.outputs[0].token_ids) for one in outputs]
    found: dict[str, Any] = {"of": len(prompts)}
    found |= {way: sum(map(tuple.__eq__, rows, answers["device"])) for way, rows in answers.items()}
    (width, tokens), lists = SIZE.lists[0], list[set[tuple[int, ...]]]()
    for graphs in (True, False):
        with switched(llm, graphs=graphs and not TINY):
            made = [_list_of(llm, width, tokens, number) for number in range(4)][-1]
            lists.append({tuple(one.tokens[tokens:]) for one in made.sequences})
            if graphs and not TINY:
                found["a list could be recorded"] = not _sets(llm).lists.graphs.fails
    found |= {"items of a list": width, "as its passes": len(lists[0] & lists[1])}
    return found | _by_rounds(llm, width, tokens)


def _profiled(llm: Any, ways: dict[str, dict[str, bool]]) -> None:
    """Say how long the device is busy: with a decoding step of each way, and with each list."""
    for way, switches in ways.items():
        with reported(way), switched(llm, **switches):
            run = _Run(llm, None if way == "none" else "items", SIZE.rows[0])
            run.begin()
            busy = profiled(lambda run=run: run.take(SIZE.steps - 3))
            run.finish()
            say({"way": way, "profile": SIZE.rows[0], **{name: one / (SIZE.steps - 3) for name, one in busy.items()}})
    for width, tokens in SIZE.lists:
        with reported(f"list of {width}"), switched(llm, graphs=True):
            for number in range(3):  # made as ever, recorded, replayed
                _list_of(llm, width, tokens, number)
            busy = profiled(lambda width=width, tokens=tokens: _list_of(llm, width, tokens, 3))
            say({"way": "list", "profile": width, "prompt": tokens, **busy})


def say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


@contextlib.contextmanager
def reported(way: str) -> Iterator[None]:
    """Turn an error into a row: what comes after it is measured all the same."""
    try:
        yield
    except Exception as error:
        say({"way": way, "failed": f"{type(error).__name__}: {error}"[:300]})


def _engine(**load: Any) -> tuple[Any, str]:
    from vllm import LLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)  # saves a process that only looks at it
    more = {"item_sets": {name: str(HOME / f"{name}.itemset") for name, *_ in SIZE.sets}, "item_set_narrow_head": "on"}
    more["ranked_list_beams"] = more["ranked_list_limit"] = max(width for width, _ in SIZE.lists)
    given = {"structured_outputs_config": {"backend": "static"}, "additional_config": more, **LOAD, **load}
    try:
        return LLM(str(MODEL), **given), given.get("attention_backend", "as it is")
    except Exception as error:
        if TINY or "NVIDIA driver" in str(error):
            raise
        say({"way": "start", "attention": "FLASH_ATTN", "failed": f"{type(error).__name__}: {error}"[:300]})
    return LLM(str(MODEL), **given | {"attention_backend": "TRITON_ATTN"}), "TRITON_ATTN"


def _core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def _runner(llm: Any) -> Any:
    from vllm_static import compat

    return compat.runner_of(_core(llm).model_executor.driver_worker)


def _sets(llm: Any) -> Any:
    from vllm_static import compat

    return compat.item_sets(_runner(llm))


@contextlib.contextmanager
def switched(
    llm: Any, *, narrow: bool = False, children: bool = False, host: bool = False, graphs: bool = False
) -> Iterator[None]:
    """While this is entered, requests go these ways. One start serves all of them."""
    from vllm_static.worker.list_graphs import ListGraphs

    sets, backend = _sets(llm), _core(llm).static_backend
    before = sets.narrow.why_not, sets.child_sampling, backend._device
    sets.narrow.why_not = before[0] if narrow or graphs else "not chosen"
    sets.child_sampling = children
    sets._plain[:] = False  # what earlier requests have noted in their slots
    backend._device = None if host else before[2]
    if sets.lists is not None:
        sets.lists.graphs = ListGraphs(sets.lists._runner, sets.lists._first_block) if graphs else None
    try:
        yield
    finally:
        sets.narrow.why_not, sets.child_sampling, backend._device = before


class _Run:
    """A batch of requests, and the engine steps that answer it."""

    def __init__(self, llm: Any, name: str | None, count: int) -> None:
        from vllm import SamplingParams

        extra = {"extra_args": {"item_set": name}} if name else {}
        self._params = SamplingParams(
            temperature=1.0, max_tokens=SIZE.steps, ignore_eos=True, detokenize=False, **extra
        )
        self._prompts: Any = [
            {"prompt_token_ids": [3 + (i * 31 + j) % 900 for j in range(SIZE.prompt)]} for i in range(count)
        ]
        self._llm, self.answers = llm, list[list[int]]()

    def begin(self) -> float:
        """Add the requests and take the steps that read their prompts. Returns the seconds that adding takes."""
        self.answers.clear()
        began = time.perf_counter()
        self._llm.enqueue(self._prompts, self._params, use_tqdm=False)
        seconds = time.perf_counter() - began
        self.take(2)
        return seconds

    def take(self, count: int) -> None:
        for _ in range(count):
            self.answers += [list(one.outputs[0].token_ids) for one in self._llm.llm_engine.step()]

    def finish(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self.take(1)

    def illegal(self, name: str) -> int:
        """Return how many answers are no items of a set."""
        import itemset

        return int((itemset.load(HOME / f"{name}.itemset").lookup(self.answers) < 0).sum())


def _interleaved(llm: Any, ways: dict[str, dict[str, bool]], count: int) -> None:
    """Measure a decoding step with `count` rows of each way, in ms: only steps in which no request starts or finishes
    count. The ways take turns, and each is held against no set in the same turn: a machine's own speed drifts."""
    runs = {way: _Run(llm, None if way == "none" else "items", count) for way in ways}
    turns: dict[str, list[list[float]]] = {way: [] for way in ways}
    rows: dict[str, dict[str, Any]] = {way: {"rows": count} for way in ways}
    parts: dict[str, Parts] = {way: Parts(llm) for way in ways}
    adding: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(1 + SIZE.turns):
        for way, run in runs.items():
            with reported(way), switched(llm, **ways[way]):
                before = dict(_sets(llm).narrow.steps)
                adding[way].append(run.begin())
                times = list[float]()
                with parts[way].taken(turn > 0):
                    for _ in range(SIZE.steps - 3):
                        began = time.perf_counter()
                        run.take(1)
                        times.append((time.perf_counter() - began) * 1e3)
                run.finish()
                if turn:  # whatever is compiled or recorded at a first use is over
                    turns[way].append(times)
                if way != "none":
                    rows[way]["illegal"] = rows[way].get("illegal", 0) + run.illegal("items")
                    now: Any = _sets(llm).narrow.steps
                    rows[way]["steps"] = {why: more for why in now if (more := now[why] - before.get(why, 0))}
    none = [median(one) for one in turns["none"]]
    for way, of_way in turns.items():
        if not of_way:  # it has failed
            continue
        each = [median(one) for one in of_way]
        ratios = sorted(one / other for one, other in zip(each, none, strict=False))
        steps = sum(map(len, of_way))
        say({
            "way": way, **rows[way], "ms a step": median(each), "least": min(map(min, of_way)),
            "of none": median(ratios), "of none, least and most": [ratios[0], ratios[-1]],
            "us to add a request": median(adding[way]) / count * 1e6,
            "host, ms a step": parts[way].of(steps),
        })  # fmt: skip


class Parts:
    """The host's time in parts of an engine's step; what is left of a step is spent waiting for the device, or passed
    from one part to the next."""

    def __init__(self, llm: Any) -> None:
        core, engine = _core(llm), llm.llm_engine
        self._spent = Counter[str]()
        self._where = [
            (core.scheduler, "schedule"), (core.scheduler, "get_grammar_bitmask"),
            (core.scheduler, "update_from_output"), (core.model_executor, "execute_model"),
            (core.model_executor, "sample_tokens"), (engine.output_processor, "process_outputs"),
        ]  # fmt: skip
        if _sets(llm).lists is not None:
            self._where += [(_sets(llm).lists, "answer"), (engine.input_processor.static_front_end.one_request, "read")]

    @contextlib.contextmanager
    def taken(self, counts: bool = True) -> Iterator[None]:
        """Count what is called meanwhile."""
        if counts:
            for owner, name in self._where:
                setattr(owner, name, self._timed(name, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name in self._where if counts else ():
                delattr(owner, name)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self._spent[name] += time.perf_counter() - began

        return timed

    def of(self, count: int) -> dict[str, float]:
        """Return the ms of each part, one of `count`."""
        return {name: spent / count * 1e3 for name, spent in self._spent.items()}


def _list_of(llm: Any, width: int, tokens: int, number: int, options: dict[str, Any] | None = None) -> Any:
    """Request a list. number: which prompt; tokens: its length. options: as a request gives them."""
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=width, max_tokens=4)
    params.extra_args = {"item_set": "ids", **(options or {})}
    prompt = {"prompt_token_ids": [3 + (number * 97 + j) % 900 for j in range(tokens)]}
    (found,) = llm.beam_search([prompt], params)
    return found


def _lists(llm: Any, width: int, tokens: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    import itemset
    from vllm_static.worker import beam_forward

    times, passes, run, parts = list[float](), 0, beam_forward._run, Parts(llm)

    def counted(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        return run(*args)

    beam_forward._run = counted
    try:
        for repeat in range(2 + 2 * SIZE.repeats):
            passes, began = 0, time.perf_counter()
            with parts.taken(repeat > 1):
                found = _list_of(llm, width, tokens, repeat, options)
            times.append((time.perf_counter() - began) * 1e3)
    finally:
        beam_forward._run = run
    items = [tuple(one.tokens[tokens : tokens + 3]) for one in found.sequences]
    legal = itemset.load(HOME / "ids.itemset").lookup([list(item) for item in items]) >= 0
    first, *later = times
    return {
        "ms": median(later[1:]), "least": min(later), "first, ms": first, "items": len(items),
        "distinct": len(set(items)), "illegal": int((~legal).sum()), "passes inside a step": passes,
        "host, ms": parts.of(2 * SIZE.repeats),
    }  # fmt: skip


def profiled(work: Callable[[], Any]) -> dict[str, float]:
    """Return for how long `work` keeps the device busy, in ms, and its kernels that take longest."""
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    spent = {one.key: one.self_device_time_total / 1e3 for one in profile.key_averages() if one.self_device_time_total}
    names = Counter[str]()
    for name, one in spent.items():  # what is left of a long name may stand for several kernels
        names[name[:70]] += one
    return {"busy, ms": sum(spent.values()), **dict(names.most_common(12))}


ACTIONS: dict[str, Callable[[], Any]] = {
    "unpack": lambda: unpack(Path(sys.argv[2])),
    "bytecode": lambda: compileall.compile_dir(str(SITE), quiet=2, workers=0) and None,
    "sets": make_sets,
    "measure": measure,
    "measure_fp8": measure_fp8,
    "measure_windows": measure_windows,
    "measure_states": measure_states,
}

if __name__ == "__main__":
    sys.exit(ACTIONS[sys.argv[1]]())
