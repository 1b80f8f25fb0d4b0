"""Real vLLM engines for tests, each in a process of its own, on model runner V1 or V2.

engine = Engine("v2", model)
outputs = engine.generate(["Once upon a time"], SamplingParams(max_tokens=8))
waiting = engine.call(lambda llm: llm.llm_engine.get_num_unfinished_requests())
engine.close()
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
from engine_words import PROMPT, Answer, Found, Item

TESTS = Path(__file__).resolve().parent

# What makes a tiny model start and run fast on two cores. Model runner V2 runs its kernels in an interpreter, whose
# time grows with the number of sequences.
FAST: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
    "kv_cache_memory_bytes": 32 << 20,
}

LOG_TAIL = 6000
HOST_STARTS = 400  # seconds, on a machine that has much else to do


class EngineError(RuntimeError):
    """The engine's or the server's process ended, or could not be brought to answer in time."""


def environment(runner: str) -> dict[str, str]:
    """The environment of a vLLM process that is to use model runner "v1" or "v2"."""
    if runner not in ("v1", "v2"):
        raise ValueError(f"runner is {runner!r}, not 'v1' or 'v2'")
    paths = [str(TESTS / "interpreter"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",  # importing TRL sets another one for all that is started afterwards
        # The engine runs in the process that asks for it, and in a server its one worker in the engine's process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        "TRITON_INTERPRET": "1" if runner == "v2" else "0",
        "OMP_NUM_THREADS": "1",
        # vLLM compiles small functions even so, which takes longer than to run them; with Triton interpreted it cannot.
        "TORCHDYNAMO_DISABLE": "1",
        # `interpreter` prepares Triton, and functions of test modules must be importable where they run.
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
    }


class HostedProcess:
    """A process forked from a `Host`, with a log and a connection, over which it is told what to start."""

    def __init__(self, host: Host, name: str, timeout: float) -> None:
        """`timeout` bounds, in seconds, every answer. The first fork waits for what its host loads and compiles."""
        self.name = name
        self.timeout = timeout
        self.pid: int | None = None
        self._host = host
        self.log_path = host.new_log(name)
        self._connection, theirs = multiprocessing.Pipe()
        try:
            with theirs, self.log_path.open("wb") as log:
                host.fork(theirs.fileno(), log.fileno())
            self.pid = pickle.loads(self._receive(max(timeout, HOST_STARTS)))
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return not self._connection.closed

    def log(self) -> str:
        """All that it has written so far."""
        return self.log_path.read_text(errors="replace")

    def close(self) -> None:
        if self.alive:
            self._connection.close()
            if self.pid is not None:
                kill_group(self.pid)

    def _send(self, function: Any, *arguments: Any) -> None:
        message = cloudpickle.dumps((function, arguments))
        with contextlib.suppress(BrokenPipeError):
            # Where it has died, reading from it says so.
            self._connection.send_bytes(message)

    def _receive(self, timeout: float | None = None) -> bytes:
        timeout = self.timeout if timeout is None else timeout
        try:
            if self._connection.poll(timeout):
                return self._connection.recv_bytes()
            if self.pid is not None:
                # Python's fault handler writes to the log what every thread is doing.
                os.killpg(self.pid, signal.SIGUSR1)
                time.sleep(0.5)
        except (EOFError, ConnectionResetError):
            raise self._died("died") from None
        except BaseException:
            # Interrupted: the answer may still come, and must not be taken for that to the next request.
            self.close()
            raise
        raise self._died(f"gave no answer within {timeout} s")

    def _died(self, what: str) -> EngineError:
        self.close()
        log = self.log() if self.pid is not None else self._host.log_path.read_text(errors="replace")
        return EngineError(f"{self.name} {what}; the end of its log:\n{log[-LOG_TAIL:]}")


class HostedEngine(HostedProcess):
    """An engine in a process of its own.

    An engine that exceeds its timeout or dies raises `EngineError` with the end of its log, and is gone; an exception
    in the engine's process is raised here and leaves it running.
    """

    def __init__(self, host: Host, name: str, timeout: float, *start: Any) -> None:
        """`start` are the arguments of what starts it (engine_host.py)."""
        super().__init__(host, name, timeout)
        try:
            self._request(None, *start)
        except BaseException:
            self.close()
            raise

    def call(self, function: Any, *arguments: Any) -> Any:
        """The result of `function(engine, *arguments)` in the engine's process.

        Functions and lambdas are sent as cloudpickle does: those that a module defines by name, others by value.
        """
        return self._request(function, *arguments)

    def _request(self, function: Any, *arguments: Any) -> Any:
        if not self.alive:
            raise EngineError("the engine is closed")
        self._send(function, *arguments)
        answer, failed = pickle.loads(self._receive())
        if failed:
            error, text = answer
            raise error from RuntimeError(f"in the engine's process:\n{text}")
        return answer


class Engine(HostedEngine):
    """A `vllm.LLM` in a process of its own. Keyword arguments go to `LLM`.

    Just before it is made, `env` is added to the environment and the function `prepare` is called there.
    """

    def __init__(
        self,
        runner: str,
        model: Path | str,
        *,
        env: dict[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        timeout: float = 120,
        **llm: Any,
    ) -> None:
        self.runner = runner
        llm = FAST | {"model": str(model)} | llm
        super().__init__(host(runner), f"the {runner} engine", timeout, env or {}, prepare, llm)

    def generate(self, prompts: Any, params: Any = None, **kwargs: Any) -> list[Any]:
        """`LLM.generate`: one prompt or a list (text, or `{"prompt_token_ids": [...]}`), one `SamplingParams` or a
        list. Returns the `RequestOutput`s."""
        return self.call(_generate, prompts, params, {"use_tqdm": False} | kwargs)

    def ask(self, prompts: list[str] | list[list[int]], words: dict[str, Any] | list[dict[str, Any]]) -> list[Answer]:
        """The answers to texts or token ids, with one request's words or each one's: several of a prompt with `n`."""
        from vllm import SamplingParams

        params = [SamplingParams(**given(one)) for one in (words if isinstance(words, list) else [words])]
        outputs = self.generate(_tokens(prompts), params if isinstance(words, list) else params[0])
        return [answered(one) for output in outputs for one in output.outputs]

    def logits(self, prefix: list[int], tokens: list[int]) -> list[float]:
        """The model's own of these tokens after PROMPT and a prefix, up to a constant."""
        from vllm import SamplingParams

        (output,) = self.generate(_tokens([[*PROMPT, *prefix]]), SamplingParams(max_tokens=1, logprobs=-1))
        return [output.outputs[0].logprobs[0][token].logprob for token in tokens]

    @property
    def refusal(self) -> type[Exception]:
        """What a refused request raises."""
        from vllm.exceptions import VLLMValidationError

        return VLLMValidationError

    def rank(self, n: int, prompts: Any = (PROMPT, PROMPT), **words: Any) -> list[Found]:
        """A list of each prompt."""
        from vllm_static.front.list_requests import RankingParams

        return self.call(_rank, _tokens(prompts), RankingParams(beam_width=n, **given({"max_tokens": 40} | words)))

    def draw(self, **words: Any) -> list[tuple[Item, float]]:
        """Items and their scores."""
        from vllm_static.front.list_requests import DrawParams

        return self.call(_draw, _tokens([PROMPT]), DrawParams(max_tokens=20, extra_args=words))


def backend(**options: Any) -> dict[str, Any]:
    """The arguments of an engine with our backend and these options."""
    return {"structured_outputs_config": {"backend": "static"}, "additional_config": options}


def force_asynchronous_scheduling() -> None:
    """For `Engine(prepare=...)`: schedule the next step before the last one has ended, as vLLM does by default on a GPU
    and never on a CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check_and_update_config = CpuPlatform.check_and_update_config

    def keeping_the_scheduling(config: Any) -> None:
        scheduling = config.scheduler_config.async_scheduling
        check_and_update_config(config)
        config.scheduler_config.async_scheduling = scheduling

    CpuPlatform.check_and_update_config = staticmethod(keeping_the_scheduling)


def take_triton_attention() -> None:
    """For `Engine(prepare=...)` with attention_config={"backend": "TRITON_ATTN"}: the attention of GPUs, interpreted,
    and their layout of the KV cache."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as cache_write

    own, platform = CpuPlatform.get_attn_backend_cls, cache_write.current_platform

    def backend_of(selected: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = selected is not None and selected.name == "TRITON_ATTN"
        return selected.get_path() if wanted else own(selected, *args, **kwargs)

    class AsXPU:
        """On CUDA its tile size depends on the capability, which a CPU has not."""

        def __getattr__(self, name: str) -> Any:
            return getattr(platform, name)

        def is_xpu(self) -> bool:
            return True

    CpuPlatform.get_attn_backend_cls = staticmethod(backend_of)
    cache_write.current_platform = AsXPU()
    triton_attn.MIN_LAUNCH_GRID_SIZE_2D = 0  # one kernel for all batches: a third of the launches of the other


def answered(one: Any) -> Answer:
    return Answer(tuple(one.token_ids), one.text, one.finish_reason, vars(one))


def given(words: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `SamplingParams` for words that both engines take."""
    from vllm.sampling_params import StructuredOutputsParams

    kinds = ("choice", "regex", "json", "grammar", "structural_tag")
    own = ("temperature", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "n")
    own += ("logit_bias", "logprobs", "top_k", "top_p", "min_p")
    own += ("frequency_penalty", "presence_penalty", "repetition_penalty")
    structured = {word: value for word, value in words.items() if word in kinds}
    return {
        **{word: value for word, value in words.items() if word in own},
        "extra_args": {word: value for word, value in words.items() if word not in kinds + own} or None,
        "structured_outputs": StructuredOutputsParams(**structured) if structured else None,
    }


def _tokens(prompts: Any) -> list[Any]:
    return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in prompts]


def _rank(llm: Any, prompts: list[Any], params: Any) -> list[Found]:
    found = []
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        tokens = prompt["prompt_token_ids"]
        begin = len(llm.get_tokenizer().decode(tokens, skip_special_tokens=True))
        items = [(one.cum_logprob, tuple(one.tokens[len(tokens) :])) for one in output.sequences]
        texts, keys = [one.text[begin:] for one in output.sequences], [one.keys for one in output.sequences]
        found.append(Found(items, texts, keys, output.proven, output.passes))
    return found


def _draw(llm: Any, prompts: list[Any], params: Any) -> list[tuple[Item, float]]:
    (output,) = llm.beam_search(prompts, params)
    assert all(one.exact for one in output.sequences)
    return [(tuple(one.tokens[len(PROMPT) : -1]), one.cum_logprob) for one in output.sequences]


def _generate(llm: Any, prompts: Any, params: Any, kwargs: dict[str, Any]) -> Any:
    return llm.generate(prompts, params, **kwargs)


class Host:
    """A process that runs `script`, from which engines are forked (engine_host.py)."""

    def __init__(self, script: Path, environment: dict[str, str]) -> None:
        # The engines' own temporary files go there as well, so that killed ones leave nothing behind.
        self.directory = Path(tempfile.mkdtemp(prefix="engines-"))
        self._logs = 0
        self._control, theirs = socket.socketpair()
        self.log_path = self.new_log("host")
        with theirs, self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(theirs.fileno())],
                env=environment | {"TMPDIR": str(self.directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def new_log(self, name: str) -> Path:
        self._logs += 1
        return self.directory / f"{name.removeprefix('the ').replace(' ', '-')}-{self._logs}.log"

    def fork(self, connection: int, log: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            # Where the host has died, reading from the connection says so.
            socket.send_fds(self._control, [b"f"], [connection, log])

    def close(self) -> None:
        self._control.close()
        kill_group(self._process.pid)
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


@cache
def host(runner: str) -> Host:
    """The process from which all engines and servers of this model runner are forked."""
    return Host(TESTS / "engine_host.py", environment(runner))


def kill_group(leader: int) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
