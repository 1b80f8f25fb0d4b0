"""The subcommand `serve`: an engine with a file of items, and the first requests to ask it."""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from itemset.cli.options import Command
from itemset.errors import ItemSetError
from itemset.storage import is_uri

_VLLM = ["-m", "vllm.entrypoints.openai.api_server", "--structured-outputs-config.backend", "static", "--model"]
_SGLANG = ["-m", "sglang.launch_server", "--grammar-backend", "static", "--model-path"]
_ENGINES = {"vllm": (_VLLM, 8000), "sglang": (_SGLANG, 30000)}
_ON_CPU = {
    # A list's passes share of the prompt what fills blocks; 32 tokens are vLLM's shortest on a CPU, 128 the default.
    "vllm": ["--enforce-eager", "--block-size", "32"],
    "sglang": ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--dtype", "float32",
               "--max-total-tokens", "8192"],
}  # fmt: skip
_CPU = Path("/proc/cpuinfo")
_REQUESTS = """
The server is ready. Requests to try:

# 1. one item
curl {url}/completions -H 'Content-Type: application/json' -d '{one}'

# 2. the ten best items, with Python's openai client
{python} -c '
from itemset.client import rank
from openai import OpenAI

client = OpenAI(base_url="{url}", api_key="none")
for item in rank(client, "{name}", {prompt}, n=10, width=64):
    print(item.key, item.text, item.score)
'
{third}"""
_THIRD = """
# 3. a JSON object with an item in a field
curl {url}/chat/completions -H 'Content-Type: application/json' -d '{field}'
"""


def add_to(command: Command) -> None:
    sub = command(
        "serve",
        serve,
        "itemset serve films.csv --model DIR --max-model-len 4096\n"
        "  itemset serve 'films=films.csv?column=title&key=movie_id' --model DIR --engine sglang\n"
        "  itemset serve sets/films --model DIR --item-set toys=toys.csv",
    )
    source = "the file, or NAME=FILE?column=C&key=K&attribute=A; an index or a published set's folder too"
    sub.add_argument("source", metavar="SOURCE", help=source)
    sub.add_argument("--model", metavar="DIR", required=True, help="the model: a folder or a Hugging Face name")
    sub.add_argument("--engine", choices=[*_ENGINES], help="default: the one that is installed")
    sub.add_argument("--port", metavar="N", type=int, help="default: the engine's, 8000 or 30000")
    sub.epilog = f"{sub.epilog}\n\nAll further arguments go to the engine: --item-set NAME=FILE adds a set."


def serve(args: argparse.Namespace) -> None:
    """Start the engine, tell what to ask it when it is ready, and wait for its end. Raises ItemSetError if it fails."""
    command, environment, url, name = command_of(args, args.more)
    _, source = named(args.source)
    paths = (source, os.path.expanduser(source.rpartition("?")[0] or source))
    if not (is_uri(source) or "*" in source or any(map(os.path.exists, paths))):
        raise ItemSetError(f"no file {source}: check the path")  # which the engine says after all its imports
    added = [f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value]
    print(f"$ {shlex.join([*added, *command])}", file=sys.stderr, flush=True)
    with subprocess.Popen(command, env=environment) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        threading.Thread(target=_tell, args=(server, url, name), daemon=True).start()
        try:
            code = server.wait()
        except KeyboardInterrupt:  # the engine has got it, too
            server.wait()
            raise
    if code not in (0, -signal.SIGTERM):
        raise ItemSetError(f"the engine ended with status {code}: its last lines say why")


def command_of(args: argparse.Namespace, more: Sequence[str]) -> tuple[list[str], dict[str, str], str, str]:
    """Return the engine's command and environment, the server's URL and the set's name. Raises ItemSetError if the
    engine is not installed."""
    engine = args.engine or next((one for one in _ENGINES if find_spec(one)), None)
    if engine is None or find_spec(engine) is None:
        wanted = engine or "vllm"
        raise ItemSetError(f"{wanted} is not installed here: pip install 'static-backend[{wanted}]'")
    name, source = named(args.source)
    words, port = _ENGINES[engine]
    given = [*words, args.model, "--item-set", f"{name}={source}", "--port", str(args.port or port)]
    environment = dict(os.environ)
    if not any(found for pattern in ("nvidia[0-9]*", "kfd", "dxg") for found in Path("/dev").glob(pattern)):
        given += _ON_CPU[engine]
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        quantised = re.search("awq|gptq|int4|int8|fp8", args.model, re.IGNORECASE)  # whose kernels take other types
        emulated = engine == "vllm" and _CPU.exists() and "bf16" not in _CPU.read_text()
        if emulated and "--dtype" not in more and not quantised:
            given += ["--dtype", "float32"]  # most models have bfloat16, which takes five times as long there
    return [sys.executable, *given, *more], environment, f"http://localhost:{args.port or port}/v1", name


def named(given: str) -> tuple[str, str]:
    """Return the name of NAME=FILE, or one made of the file's, and the file with its options."""
    name, mark, source = given.partition("=")
    if mark and re.fullmatch(r"[\w.-]+", name):
        return name, source
    return re.sub(r"\W+", "_", Path(given.partition("?")[0]).stem).strip("_") or "items", given


def requests_of(url: str, name: str, model: str, answers: Callable[[str, str], bool] = lambda *_: True) -> str:
    """Return the requests, to be pasted into a shell. answers: tells whether the server answers a body at an endpoint:
    not every model has a chat template."""
    prompt = f"One of the {name}: "
    field = {"type": "object", "properties": {"choice": {"type": "string", "item_set": name}}, "required": ["choice"]}
    bodies = {
        "one": {"model": model, "prompt": prompt, "max_tokens": 64, "item_set": name},
        "field": {
            "model": model,
            "messages": [{"role": "user", "content": f"Which of the {name} do you like? Answer in JSON."}],
            "max_tokens": 96,
            "response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": field}},
        },
    }
    texts = {key: json.dumps(body) for key, body in bodies.items()}
    works = answers(f"{url}/chat/completions", texts["field"])
    texts["third"] = _THIRD.format(url=url, field=texts["field"]) if works else ""
    return _REQUESTS.format(url=url, name=name, prompt=json.dumps(prompt), python=shlex.quote(sys.executable), **texts)


def _answers(opener: urllib.request.OpenerDirector, url: str, body: str) -> bool:
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=120):
            return True
    except OSError:
        return False


def _tell(server: "subprocess.Popen[bytes]", url: str, name: str) -> None:
    """Wait until the server answers, and print the requests."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while server.poll() is None:
        try:
            with opener.open(f"{url}/models", timeout=5) as answer:
                model = json.load(answer)["data"][0]["id"]
        except OSError:
            threading.Event().wait(0.5)
            continue
        print(requests_of(url, name, model, partial(_answers, opener)), flush=True)
        return
