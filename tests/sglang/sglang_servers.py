"""SGLang's real HTTP server for tests, on a CPU.

with Server(model, grammar_backend="xgrammar") as server:
    status, body = server.post("/generate", {"text": "Once upon a time", "sampling_params": {"regex": "[0-9]+"}})
    answer = server.client.completions.create(model=server.model_name, prompt="Once upon a time")
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from servers import ForkedServer, HttpServer, Process, ServerProcess, flags, free_port, log_of_failure
from sglang_engines import FAST, environment, host


class Server(HttpServer):
    """A running SGLang server. Keyword arguments become flags, `arguments` are passed on as they stand, `env` is added
    to the environment.

    `--name value` comes from `name=value`, `--name` from True, JSON from a dict; None and False drop one of the
    defaults in `FAST`. With `forked`, it starts much faster, in a process that has SGLang imported already; without,
    it is `python -m sglang.launch_server`.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        arguments: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        timeout: float = 180,
        forked: bool = True,
        **options: Any,
    ) -> None:
        port = free_port()
        given = [*_flags(model, port, options), *arguments]
        if forked:
            process: Process = ForkedServer(host(), "the SGLang server", port, given, _HEALTH | (env or {}), timeout)
        else:
            process = _started(given, port, env or {})
        super().__init__(process, timeout)


def start_expecting_failure(
    model: Path | str,
    *,
    arguments: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    timeout: float = 120,
    **options: Any,
) -> str:
    """The log of a server that refused to start. AssertionError if it starts, or has done neither in time."""
    port = free_port()
    return log_of_failure(_started([*_flags(model, port, options), *arguments], port, env or {}), timeout)


# Else every look at the server's health generates a token, and takes a second.
_HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


def _flags(model: Path | str, port: int, options: dict[str, Any]) -> list[str]:
    own = {"model_path": str(model), "served_model_name": Server.model_name, "host": "127.0.0.1", "port": port}
    return flags({name: value for name, value in (own | FAST | options).items() if value is not False})


def _started(given: list[str], port: int, env: dict[str, str]) -> ServerProcess:
    return ServerProcess([sys.executable, "-m", "sglang.launch_server", *given], port, environment() | _HEALTH | env)
