"""Item sets and ranked lists over HTTP with several ranks, engines or front ends, on a CPU; every answer is looked up.

python benchmarks/parallel.py                     vLLM or SGLang, whichever this environment has
python benchmarks/parallel.py --only ray          with the package `ray`: vLLM has it on GPUs alone
python benchmarks/parallel.py --only router       with `sglang-router`: two servers, asked through it

A row for each configuration: what was served, or in which words the engine itself refuses. `--only WORD` runs the
configurations whose name has the word in it.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from runner import END, Report, Row, engine_here, parser, server, tiny_model

VLLM = (
    ("--tensor-parallel-size", "2"),
    ("--pipeline-parallel-size", "2"),
    ("--data-parallel-size", "2"),
    ("--api-server-count", "2"),
    ("--tensor-parallel-size", "2", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"),
)
ROUTER = ("two servers through the router",)
SGLANG = (
    ("--tp-size", "2"),
    ("--pp-size", "2"),
    ("--dp-size", "2"),
    ("--tokenizer-worker-num", "2"),
    ("--tp-size", "2", "--speculative-algorithm", "NGRAM"),
    ROUTER,
)
COLOURS = ["red", "green", "blue"]
REQUESTS = 48
ERROR = re.compile(r"^(?!.*(?:WARNING|root cause above)).*?((?:\w+Error|Exception|static-backend)\b.*)$", re.MULTILINE)


def start(runner: str, flags: tuple[str, ...], sets: list[str]) -> Any:
    """A server. Raises EngineError with the end of its log if it does not start."""
    if runner == "sglang":
        bound = "" if flags[0] == "--tokenizer-worker-num" else "0|1"
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = bound
        return server("sglang", {}, arguments=(*flags, *sets))
    from servers import Server

    # A core each, on one NUMA node; and no torch.compile, which looks for a Triton that compiles.
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    arguments = ("--guided-decoding-backend", "static", *flags, *sets)
    return Server(runner, tiny_model(), arguments=arguments, env=env, timeout=300)


class Routed:
    """Two servers that are asked through SGLang's router, in turns."""

    model_name = "tiny"

    def __init__(self, sets: list[str]) -> None:
        from servers import HttpServer, ServerProcess, free_port

        with ExitStack() as stack:
            self._each = [stack.enter_context(start("sglang", ("--dp-size", "1"), sets)) for _ in range(2)]
            port = free_port()
            command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--policy", "round_robin"]
            command += ["--worker-urls", *(one.url for one in self._each)]
            self._router = stack.enter_context(HttpServer(ServerProcess(command, port, dict(os.environ)), 120))
            self._all = stack.pop_all()
        self.post, self.log = self._router.post, self._router.log

    def __enter__(self) -> Routed:
        return self

    def __exit__(self, *_: object) -> None:
        answered = [one.log().count("POST /v1/completions") for one in self._each]
        print(f"requests that each server answered: {answered}", file=sys.stderr)
        self._all.close()


def served(running: Any, named: dict[str, Any]) -> str:
    """What it answers to requests of all kinds at once. Raises AssertionError for an answer outside its set."""
    ranked = {"item_set": "prefixes", "use_beam_search": True, "n": 7}
    kinds = [*({"item_set": name} for name in named), {"structured_outputs": {"choice": COLOURS}}, ranked]

    def ask(i: int) -> tuple[Row, list[Any]]:
        body = kinds[i % len(kinds)]
        more = {"model": running.model_name, "prompt": f"request {i}", "max_tokens": 40, "return_token_ids": True}
        status, answer = running.post("/v1/completions", {**more, **body}, timeout=200)
        if status >= 500:
            raise OSError(f"HTTP {status}: {answer}")  # the engine has ended; its log says why
        assert status == 200, (body, answer)
        return body, answer["choices"]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    lists = 0
    for body, choices in answers:
        if "use_beam_search" in body:
            lists += 1
            assert len(choices) == 7, choices
            assert len({choice["item"]["key"] for choice in choices}) == 7
        elif "item_set" in body:
            (choice,) = choices
            item = tuple(token for token in choice["token_ids"] if token != END)
            assert item in named[body["item_set"]].items, (body, choice)
        else:
            assert choices[0]["text"] in COLOURS, choices
    return f"{len(answers) - lists} items and {lists} lists, all in their sets"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="a word in the names of the configurations to run")
    arguments = options.parse_args()
    from engines import EngineError
    from sets import named_flags, token_sets

    on_sglang, rows = engine_here() == "sglang", list[Row]()
    every = [("sglang", flags) for flags in SGLANG] if on_sglang else [(r, f) for r in ("v1", "v2") for f in VLLM]
    with tempfile.TemporaryDirectory() as folder:
        named = token_sets(Path(folder))
        sets = named_flags(named)
        for runner, flags in every:
            name = f"`{' '.join(flags)}` {runner.upper()}"
            if arguments.only not in name:
                continue
            try:
                with Routed(sets) if flags == ROUTER else start(runner, flags, sets) as running:
                    try:
                        said = served(running, named)
                    except OSError as error:
                        said = f"ENDED: {(ERROR.findall(running.log()) or [str(error)])[-1]:.300}"
            except EngineError as error:
                said = f"does not start: {(ERROR.findall(str(error)) or [str(error)[-200:]])[-1]}"
            except AssertionError as error:
                said = f"WRONG: {str(error)[:300]}"
            rows.append({"configuration": name, "served": said})
            print(rows[-1], file=sys.stderr, flush=True)
    Report(arguments).add("parallel", rows)
    return any(row["served"].startswith(("ENDED", "WRONG")) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
