"""Demo: a vLLM server whose model can only answer with one of 1682 film titles.

Run it with `python3 bootstrap.py demo`. It fetches a small model and the titles, builds their index, starts the
server, asks it for films over its OpenAI-compatible API and shows that every answer is a film of the list.

With `--forced-drafts` the server speculates: what a title's first tokens leave no choice about is proposed as a draft,
and accepted in one step. That needs vLLM's model runner V2, which without a GPU runs through Triton's interpreter: it
works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
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
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import openai
from films_data import CACHE, model_dir, titles
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice

import itemset

TASTES = ["a space adventure", "a scary film", "something for children", "a love story"]
PROMPT = [
    {"role": "system", "content": "Answer with the title and year of a film."},
    {"role": "user", "content": "a comedy with robots"},
    {"role": "assistant", "content": "Short Circuit (1986)"},
    {"role": "user", "content": "a film about the war in Vietnam"},
    {"role": "assistant", "content": "Platoon (1986)"},
]
ANSWERS_PER_TASTE = 3  # the last of them is streamed
MODEL_NAME = "SmolLM2-135M-Instruct"
ITEM_SET = "films"
INDEX = CACHE / "films.itemset"
SERVER_LOG = CACHE / "server.log"
SERVER_PATIENCE = 600  # seconds
FORCED_DRAFTS = '{"method": "ngram_gpu", "num_speculative_tokens": 7, "prompt_lookup_max": 4}'
INTERPRETER = Path(__file__).resolve().parent.parent / "tests" / "interpreter"  # lets V2 run without a GPU
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoError(Exception):
    """What went wrong, for the user to read."""


@dataclass
class Answer:
    taste: str
    text: str
    token_ids: list[int]
    pieces: list[str] = field(default_factory=list)  # of a streamed answer


def build_index(catalogue: Path, model: Path) -> None:
    """Build the index of the titles, unless it is newer than what it is made from."""
    sources = (catalogue, model / "tokenizer.json")
    if INDEX.exists() and INDEX.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        with suppress(itemset.ItemSetError):  # of an older version of this project, say
            itemset.load(INDEX)
            return
    arguments = ["build", str(catalogue), "--column", "title", "--key", "movie_id"]
    arguments += ["--tokenizer", str(model), "-o", str(INDEX)]
    print("$", shlex.join(["itemset", *arguments]), flush=True)
    subprocess.run([Path(sys.executable).with_name("itemset"), *arguments], check=True)


def server_command(model: Path, port: int, forced_drafts: bool) -> list[str]:
    options = {
        "--model": str(model),
        "--served-model-name": MODEL_NAME,
        "--max-model-len": "1024",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--structured-outputs-config.backend": "static",
        "--item-set": f"{ITEM_SET}={INDEX}",
    }
    if forced_drafts:
        options["--speculative-config"] = FORCED_DRAFTS
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *itertools.chain(*options.items())]
    if vllm_is_for_cpus():
        return [*command, "--dtype", "bfloat16", "--enforce-eager"]
    return [*command, "--gpu-memory-utilization", "0.5"]


def server_environment(forced_drafts: bool) -> dict[str, str]:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    if forced_drafts:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if vllm_is_for_cpus():
            paths = [str(INTERPRETER), os.environ.get("PYTHONPATH", "")]
            environment |= {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return environment


def vllm_is_for_cpus() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Signals to stop wait for the end of the block, so that it is done as a whole."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def running_server(model: Path, forced_drafts: bool) -> Iterator[str]:
    """A vLLM server that answers at the URL given, and is gone with all its processes after the block."""
    port = free_port()
    server: subprocess.Popen[bytes] | None = None
    try:
        with SERVER_LOG.open("w") as log, signals_held_back():
            # A session of its own: the server's processes can be ended together, and Ctrl-C reaches only the demo.
            server = subprocess.Popen(
                server_command(model, port, forced_drafts),
                env=server_environment(forced_drafts),
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
    while not answers(url):
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


async def ask_all(url: str) -> list[Answer]:
    """All questions at once, as the users of a busy server would."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=300) as client:
        questions = []
        for seed, taste in enumerate(TASTES * ANSWERS_PER_TASTE):
            last = seed >= len(TASTES) * (ANSWERS_PER_TASTE - 1)
            questions.append(ask_streaming(client, taste, seed) if last else ask(client, taste, seed))
        answers_given = await asyncio.gather(*questions)
    return sorted(answers_given, key=lambda answer: TASTES.index(answer.taste))


def request(taste: str, seed: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "messages": [*PROMPT, {"role": "user", "content": taste}],
        "temperature": 0.8,
        "seed": seed,
        "max_tokens": 64,
        "extra_body": {"item_set": ITEM_SET, "return_token_ids": True},
    }


async def ask(client: openai.AsyncOpenAI, taste: str, seed: int) -> Answer:
    completion = await client.chat.completions.create(**request(taste, seed))
    choice = completion.choices[0]
    return Answer(taste, choice.message.content or "", token_ids_of(choice))


async def ask_streaming(client: openai.AsyncOpenAI, taste: str, seed: int) -> Answer:
    answer = Answer(taste, "", [])
    async for chunk in await client.chat.completions.create(stream=True, **request(taste, seed)):
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            answer.text += piece
            answer.pieces += [piece] if piece else []
            answer.token_ids += token_ids_of(choice)
    return answer


def token_ids_of(choice: Choice | ChunkChoice) -> list[int]:
    """The tokens behind an answer, which vLLM adds to the OpenAI format when asked."""
    return (choice.model_extra or {}).get("token_ids") or []


def report(answers_given: list[Answer], catalogue: Path, stop_token: int) -> bool:
    """Print a table of the answers with their films' keys; True if every one is a film of the list."""
    with catalogue.open(newline="", encoding="utf-8") as file:
        title_of = {int(row["movie_id"]): row["title"] for row in csv.DictReader(file)}
    items = itemset.load(INDEX)
    row = "{:24}{:<8}{}"
    print("\n" + row.format("taste", "key", "answer"))
    strangers = 0
    for answer in answers_given:
        tokens = answer.token_ids[:-1] if answer.token_ids[-1:] == [stop_token] else answer.token_ids
        try:
            key = int(items.lookup([tokens])[0])
        except itemset.ItemSetError:
            key = -1
        known = title_of.get(key) == answer.text
        strangers += not known
        print(row.format(answer.taste, key if known else "none", answer.text))
    streamed = next(answer for answer in answers_given if answer.pieces)
    print(f"\nstreamed: {'|'.join(streamed.pieces)}")
    verdict = f"{strangers} of them NOT in the list" if strangers else "all of them in the list"
    print(f"{len(title_of)} films, {len(answers_given)} answers, {verdict}")
    return not strangers


def steps_an_answer(url: str, answers_given: list[Answer]) -> str:
    """How many steps of the model an answer took, by vLLM's own counters; without drafts it is a step a token."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    name = "vllm:spec_decode_num_drafts_total"
    verified = sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
    tokens = sum(len(answer.token_ids) for answer in answers_given)
    count = len(answers_given)
    return f"{1 + verified / count:.1f} steps an answer, of {tokens / count:.1f} tokens each"


def stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forced-drafts", action="store_true", help="speculate with what the titles force")
    forced_drafts = parser.parse_args().forced_drafts
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    # No proxy stands between this machine and itself.
    exceptions = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = f"{exceptions},127.0.0.1" if exceptions else "127.0.0.1"
    try:
        catalogue, model = titles(), model_dir()
        build_index(catalogue, model)
        with running_server(model, forced_drafts) as url:
            started = time.monotonic()
            answers_given = asyncio.run(ask_all(url))
            print(f"{len(answers_given)} answers in {time.monotonic() - started:.1f} s", flush=True)
            if forced_drafts:
                print(steps_an_answer(url, answers_given), flush=True)
        stop_token = json.loads((model / "config.json").read_text())["eos_token_id"]
        return 0 if report(answers_given, catalogue, stop_token) else 1
    except (DemoError, openai.APIError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"\nthis command failed (its own words are above): {shlex.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
