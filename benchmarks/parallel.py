"""Item sets and ranked lists over HTTP with several ranks, engines or front ends, on a CPU.

python benchmarks/parallel.py                     in vLLM's environment
python benchmarks/parallel.py --engine sglang     in SGLang's
python benchmarks/parallel.py --only ray          with the package `ray`: vLLM has it on GPUs alone
python benchmarks/parallel.py --engine sglang --only router    with `sglang-router`: two servers, asked through it

Starts a server with a tiny model for each configuration, asks it for items and lists at once, and looks every answer
up. Prints a row of a table for each: what was served, or in which words the engine itself refuses. `--only WORD` runs
the configurations whose name has the word in it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "sglang")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

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
EOS = 1
ERROR = re.compile(r"^(?!.*(?:WARNING|root cause above)).*?((?:\w+Error|Exception|static-backend)\b.*)$", re.MULTILINE)


def start(engine: str, runner: str, flags: tuple[str, ...], sets: list[str]) -> Any:
    """A server. Raises EngineError with the end of its log if it does not start."""
    from models import cached_tiny_llama

    given = (*flags, *sets)
    if engine == "sglang":
        from sglang_servers import Server as SGLangServer

        arguments = ("--grammar-backend", "static", *given)
        cores = {} if flags[0] == "--tokenizer-worker-num" else {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        return SGLangServer(cached_tiny_llama(), arguments=arguments, env=cores, forked=False, timeout=300)
    from servers import Server

    # A core each, on one NUMA node; and no torch.compile, which looks for a Triton that compiles.
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    arguments = ("--guided-decoding-backend", "static", *given)
    return Server(runner, cached_tiny_llama(), arguments=arguments, env=env, timeout=300)


class Routed:
    """Two servers that are asked through SGLang's router, in turns."""

    model_name = "tiny"

    def __init__(self, sets: list[str]) -> None:
        from servers import HttpServer, ServerProcess, free_port

        with ExitStack() as stack:
            self._each = [stack.enter_context(start("sglang", "", ("--dp-size", "1"), sets)) for _ in range(2)]
            port = free_port()
            command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--policy", "round_robin"]
            command += ["--worker-urls", *(server.url for server in self._each)]
            self._router = stack.enter_context(HttpServer(ServerProcess(command, port, dict(os.environ)), 120))
            self._all = stack.pop_all()
        self.post, self.log = self._router.post, self._router.log

    def __enter__(self) -> Routed:
        return self

    def __exit__(self, *_: object) -> None:
        answered = [server.log().count("POST /v1/completions") for server in self._each]
        print(f"requests that each server answered: {answered}", file=sys.stderr)
        self._all.close()


def served(server: Any, named: dict[str, Any]) -> str:
    """What it answers to requests of all kinds at once. Raises AssertionError for an answer outside its set."""
    ranked = {"item_set": "prefixes", "use_beam_search": True, "n": 7}
    kinds = [*({"item_set": name} for name in named), {"structured_outputs": {"choice": COLOURS}}, ranked]

    def ask(i: int) -> tuple[dict[str, Any], list[Any]]:
        body = kinds[i % len(kinds)]
        more = {"model": server.model_name, "prompt": f"request {i}", "max_tokens": 40, "return_token_ids": True}
        status, answer = server.post("/v1/completions", {**more, **body}, timeout=200)
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
            item = tuple(token for token in choice["token_ids"] if token != EOS)
            assert item in named[body["item_set"]].items, (body, choice)
        else:
            assert choices[0]["text"] in COLOURS, choices
    return f"{len(answers) - lists} items and {lists} lists, all in their sets"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--only", default="", help="a word in the names of the configurations to run")
    asked = parser.parse_args()
    from engines import EngineError
    from sets import named_flags, token_sets

    every = [(runner, flags) for runner in ("v1", "v2") for flags in VLLM]
    if asked.engine == "sglang":
        every = [("", flags) for flags in SGLANG]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        named = token_sets(Path(folder))
        sets = named_flags(named)
        for runner, flags in every:
            name = " ".join(filter(None, [f"`{' '.join(flags)}`", runner.upper()]))
            if asked.only not in name:
                continue
            try:
                made = Routed(sets) if flags == ROUTER else start(asked.engine, runner, flags, sets)
                with made as server:
                    try:
                        said = served(server, named)
                    except OSError as error:
                        wrong, said = 1, f"ENDED: {(ERROR.findall(server.log()) or [str(error)])[-1]:.300}"
            except EngineError as error:
                said = f"does not start: {(ERROR.findall(str(error)) or [str(error)[-200:]])[-1]}"
            except AssertionError as error:
                wrong, said = 1, f"WRONG: {str(error)[:300]}"
            print(f"| {name} | {said} |", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
