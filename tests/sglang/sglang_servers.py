"""SGLang's real HTTP server for tests, on a CPU.

server = Server(model, grammar_backend="xgrammar")
status, body = server.post("/generate", {"text": "Once upon a time", "sampling_params": {"regex": "[0-9]+"}})
answer = server.client.completions.create(model=server.model_name, prompt="Once upon a time")
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from servers import ForkedServer, HttpServer, ServerProcess, flags, free_port, log_of_failure
from sglang_engines import FAST, environment, host


class Server(HttpServer):
    """A running SGLang server. Keyword arguments become flags, `arguments` are passed on as they stand, `env` is added
    to the environment.

    `--name value` comes from `name=value`, `--name` from True, JSON from a dict; None and False drop one of the
    defaults in `FAST`. It runs in a process that has SGLang imported already.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        arguments: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        timeout: float = 180,
        **options: Any,
    ) -> None:
        port = free_port()
        given = [*flags_of(model, port, options), *arguments]
        super().__init__(ForkedServer(host(), "the SGLang server", port, given, HEALTH | (env or {}), timeout), timeout)


def start_expecting_failure(
    model: Path | str,
    *,
    arguments: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    timeout: float = 120,
    fresh: bool = False,
    **options: Any,
) -> str:
    """The log of a server that refused to start, as `servers.start_expecting_failure` has it."""
    port = free_port()
    given, more = [*flags_of(model, port, options), *arguments], HEALTH | (env or {})
    if not fresh:
        return log_of_failure(ForkedServer(host(), "the server", port, given, more, timeout), timeout)
    command = [sys.executable, "-m", "sglang.launch_server", *given]
    return log_of_failure(ServerProcess(command, port, environment() | more), timeout)


# Else every look at the server's health generates a token, and takes a second.
HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


def flags_of(model: Path | str, port: int, options: dict[str, Any]) -> list[str]:
    own = {"model_path": str(model), "served_model_name": Server.model_name, "host": "127.0.0.1", "port": port}
    return flags({name: value for name, value in (own | FAST | options).items() if value is not False})
