"""Starting vLLM's or SGLang's OpenAI-compatible server for an example, and ending it with all its processes."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from films_data import CACHE

MODEL_NAME = "SmolLM2-135M-Instruct"
SERVER_LOG = CACHE / "server.log"
SERVER_PATIENCE = 600  # seconds
ANSWER_PATIENCE = 1_200  # a list takes minutes where other programs have the cores
FORCED_DRAFTS = '{"method": "ngram_gpu", "num_speculative_tokens": 7, "prompt_lookup_max": 4}'
WAITS = ("Compiling loops for this machine", "building an index of")  # in the log: what only a first start waits for
INTERPRETER = Path(__file__).resolve().parent.parent / "tests" / "interpreter"  # lets V2 run without a GPU
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoError(Exception):
    """What went wrong, for the user to read."""


@dataclass(frozen=True)
class Launch:
    """What is served, and by which engine."""

    engine: str
    model: Path
    item_set: str  # NAME=FILE
    forced_drafts: bool = False
    dtype: str = "bfloat16"

    def command(self, port: int) -> list[str]:
        return _sglang_command(self, port) if self.engine == "sglang" else _vllm_command(self, port)

    def environment(self) -> dict[str, str]:
        environment = {"HF_HUB_OFFLINE": "1", **os.environ}
        stands_in = None
        if self.engine == "vllm":
            environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **environment}
            if self.forced_drafts:
                environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
                if vllm_is_for_cpus():
                    environment["TRITON_INTERPRET"], stands_in = "1", INTERPRETER
        if stands_in is not None:
            paths = [str(stands_in), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return environment


def _vllm_command(launch: Launch, port: int) -> list[str]:
    options = {
        "--model": str(launch.model),
        "--served-model-name": MODEL_NAME,
        "--max-model-len": "1024",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--structured-outputs-config.backend": "static",
        "--structured-outputs-config.disable_any_whitespace": "true",  # JSON without empty lines
        "--item-set": launch.item_set,
    }
    if launch.forced_drafts:
        options["--speculative-config"] = FORCED_DRAFTS
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *itertools.chain(*options.items())]
    if vllm_is_for_cpus():
        return [*command, "--dtype", launch.dtype, "--enforce-eager"]
    return [*command, "--gpu-memory-utilization", "0.5"]


def _sglang_command(launch: Launch, port: int) -> list[str]:
    options = {
        "--model-path": str(launch.model),
        "--served-model-name": MODEL_NAME,
        "--context-length": "1024",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--grammar-backend": "static",
        "--item-set": launch.item_set,
    }
    command = [sys.executable, "-m", "sglang.launch_server", *itertools.chain(*options.items())]
    command.append("--constrained-json-disable-any-whitespace")
    if nvidia_gpu():
        return [*command, "--mem-fraction-static", "0.5"]
    small = {
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--dtype": "float32",
        "--max-total-tokens": "8192",
    }
    return [*command, *itertools.chain(*small.items()), "--disable-cuda-graph"]


def nvidia_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def vllm_is_for_cpus() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def post(url: str, body: dict[str, Any]) -> Any:
    """Send a JSON request; return its answer. Raises DemoError with the server's own message."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_PATIENCE) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise DemoError(f"{url}: {error.read().decode()}") from error
    except OSError as error:  # busy cores are slow, most of all with SGLang, whose CPU kernels are stand-ins
        raise DemoError(f"{url}: {error}: see {SERVER_LOG}, and try again while less else is running") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Delay signals to stop until the end of the block, so that it runs as a whole."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def running_server(launch: Launch) -> Iterator[str]:
    """Run a server that answers at the given URL, and end it with all its processes after the block."""
    port = free_port()
    server: subprocess.Popen[bytes] | None = None
    try:
        with SERVER_LOG.open("w") as log, signals_held_back():
            # A session of its own: the server's processes can be ended together, and Ctrl-C reaches only the demo.
            server = subprocess.Popen(
                launch.command(port),
                env=launch.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=let_signals_in,
            )
        wait_until_healthy(server, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        if server:
            with signals_held_back():
                end_process_group(server)


def wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    period, end = (1, "\r") if sys.stdout.isatty() else (5, "\n")
    started = shown = time.monotonic()
    told = set[str]()
    while True:
        for line in SERVER_LOG.read_text(errors="replace").splitlines():
            if line not in told and any(mark in line for mark in WAITS):
                told.add(line)
                print(line, flush=True)
        if answers(url):
            break
        seconds = time.monotonic() - started
        if server.poll() is not None or seconds > SERVER_PATIENCE:
            last_lines = "\n".join(SERVER_LOG.read_text(errors="replace").splitlines()[-20:])
            raise DemoError(f"the server did not start; the end of {SERVER_LOG}:\n{last_lines}")
        if time.monotonic() - shown >= period:
            shown += period
            print(f"server starting: {seconds:.0f} s", end=end, flush=True)
        time.sleep(0.2)
    print(f"server ready after {time.monotonic() - started:.0f} s", flush=True)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def end_process_group(leader: subprocess.Popen[bytes]) -> None:
    """End the server and its engine processes: politely, then by force."""
    with suppress(OSError):  # the terminal may be gone
        print("\nending the server", flush=True)
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            leader.poll()
            try:
                os.killpg(leader.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def run(example: Callable[[], bool]) -> int:
    """Run an example; return its exit status, 0 if it returns True. Errors are printed, and no server keeps running."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGHUP, _stop)
    # No proxy stands between this machine and itself.
    exceptions = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = f"{exceptions},127.0.0.1" if exceptions else "127.0.0.1"
    try:
        return 0 if example() else 1
    except DemoError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"\nthis command failed (its own words are above): {shlex.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
