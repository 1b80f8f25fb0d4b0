"""vLLM's real OpenAI server for tests, on model runner V1 or V2.

server = Server("v1", model, structured_outputs_config={"backend": "xgrammar"})
answer = server.client.completions.create(model=server.model_name, prompt="Once upon a time")
status, body = server.post("/v1/completions", {"model": server.model_name, "prompt": None})
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from engines import FAST, LOG_TAIL, EngineError, Host, HostedProcess, environment, host, kill_group


class Process(Protocol):
    """What a server runs in."""

    url: str

    @property
    def returncode(self) -> int | None: ...

    def log(self) -> str: ...

    def close(self) -> None: ...


class HttpServer:
    """A running server with an OpenAI interface."""

    model_name = "tiny"

    def __init__(self, process: Process, timeout: float) -> None:
        self._process = process
        self.url = process.url
        try:
            _wait_until_healthy(process, timeout)
        except BaseException:
            self.close()
            raise

    @cached_property
    def client(self) -> Any:
        """An `openai.OpenAI` that never retries: a test wants to see the first answer."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, body: Any, timeout: float = 60) -> tuple[int, Any]:
        """Post JSON; returns the status and the body, decoded where it is JSON."""
        return _request(
            urllib.request.Request(
                self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
            ),
            timeout,
        )

    def send(self, path: str, data: bytes, *content_types: str, timeout: float = 60) -> tuple[int, Any]:
        """Post these bytes, with a header for each of the content types (application/json where there is none)."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=timeout)
        with contextlib.closing(connection):
            connection.putrequest("POST", path)
            connection.putheader("Content-Length", str(len(data)))
            for content_type in content_types or ("application/json",):
                connection.putheader("Content-Type", content_type)
            connection.endheaders(data)
            response = connection.getresponse()
            text = response.read().decode()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def events(self, path: str, body: Any) -> list[Any]:
        """Post JSON; returns the events of the stream, as JSON."""
        status, text = self.post(path, body)
        assert status == 200, text
        data = [line.removeprefix("data: ") for line in str(text).splitlines() if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]

    def get(self, path: str, timeout: float = 60) -> tuple[int, Any]:
        return _request(urllib.request.Request(self.url + path), timeout)

    def figures(self) -> dict[str, float]:
        """The plugin's metrics, by name and labels."""
        text = self.get("/metrics")[1]
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("item_set:")]
        return {name: float(value) for name, value in lines if "_created" not in name}

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def log(self) -> str:
        """All that the server's processes have written so far."""
        return self._process.log()

    def close(self) -> None:
        self._process.close()


class EngineServer(HttpServer):
    """A running server of an engine, in a process that has this imported already. Keyword arguments become flags,
    `arguments` are passed on as they stand, `env` is added to the environment.

    `--name value` comes from `name=value`, `--name` from True, `--no-name` from False, JSON from a dict; None drops one
    of the defaults in `FAST`.
    """

    module: str
    """What `python -m` starts."""
    more: ClassVar[dict[str, str]] = {}
    """What is always added to the environment."""
    host: Callable[..., Host]
    environment: Callable[..., dict[str, str]]

    def __init__(self, *where: Path | str, timeout: float = 180, **given: Any) -> None:
        """where: the model, after vLLM's model runner."""
        super().__init__(self.process(*where, timeout=timeout, **given), timeout)

    @classmethod
    def process(
        cls,
        *where: Path | str,
        timeout: float,
        arguments: Sequence[str] = (),
        env: dict[str, str] | None = None,
        fresh: bool = False,
        **options: Any,
    ) -> Process:
        """fresh: in an interpreter of its own, as users start it, which takes ten seconds longer."""
        *runner, model = where
        port, more = free_port(), cls.more | (env or {})
        given = [*cls.flags_of(model, port, options), *arguments]
        if not fresh:
            return ForkedServer(cls.host(*runner), "the server", port, given, more, timeout)
        return ServerProcess([sys.executable, "-m", cls.module, *given], port, cls.environment(*runner) | more)

    @classmethod
    def fail(cls, *where: Path | str, timeout: float = 120, **given: Any) -> str:
        """The log of a server that refused to start. AssertionError if it starts, or has done neither in time."""
        return log_of_failure(cls.process(*where, timeout=timeout, **given), timeout)

    @classmethod
    def flags_of(cls, model: Path | str, port: int, options: dict[str, Any]) -> list[str]:
        raise NotImplementedError


class Server(EngineServer):
    """vLLM's, on model runner "v1" or "v2"."""

    module = "vllm.entrypoints.openai.api_server"
    host, environment = staticmethod(host), staticmethod(environment)

    @classmethod
    def flags_of(cls, model: Path | str, port: int, options: dict[str, Any]) -> list[str]:
        own = {"model": str(model), "served_model_name": cls.model_name, "host": "127.0.0.1", "port": port}
        return flags(own | FAST | options)


start_expecting_failure = Server.fail


def log_of_failure(process: Process, timeout: float) -> str:
    """Wait until it ends with an error. AssertionError if it does not."""
    try:
        _wait_until_healthy(process, timeout)
    except EngineError as error:
        if process.returncode is None:
            raise AssertionError(str(error)) from None
        if process.returncode == 0:
            raise AssertionError(f"the server ended without an error:\n{process.log()[-LOG_TAIL:]}") from None
        return process.log()
    finally:
        process.close()
    raise AssertionError(f"the server started:\n{process.log()[-LOG_TAIL:]}")


def _wait_until_healthy(process: Process, timeout: float) -> None:
    started = time.monotonic()
    while process.returncode is None:
        with contextlib.suppress(OSError):
            if _request(urllib.request.Request(f"{process.url}/health"), timeout=5)[0] == 200:
                return
        if time.monotonic() - started > timeout:
            raise EngineError(f"the server was not up within {timeout} s:\n{process.log()[-LOG_TAIL:]}")
        time.sleep(0.1)
    raise EngineError(f"the server ended with status {process.returncode}:\n{process.log()[-LOG_TAIL:]}")


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until something becomes true. AssertionError if it does not within two minutes."""
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


class ForkedServer(HostedProcess):
    """A server forked from the engines' host. It answers nothing over its connection, which closes when it ends."""

    def __init__(self, host: Host, name: str, port: int, given: list[str], env: dict[str, str], timeout: float) -> None:
        super().__init__(host, name, timeout)
        self.url = f"http://127.0.0.1:{port}"
        self._send(None, env, None, {"server": given})

    @property
    def returncode(self) -> int | None:
        return 1 if not self.alive or self._connection.poll(0) else None


class ServerProcess:
    """The server's process group, its port and its log."""

    def __init__(self, command: list[str], port: int, environment: dict[str, str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="server-")
        self._log_path = Path(self._directory.name) / "server.log"
        self._last_log = ""
        self.url = f"http://127.0.0.1:{port}"
        with self._log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                command,
                env=environment | {"TMPDIR": self._directory.name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.close)

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def log(self) -> str:
        if self._log_path.exists():
            self._last_log = self._log_path.read_text(errors="replace")
        return self._last_log

    def close(self) -> None:
        if self._log_path.exists():
            self.log()
            kill_group(self._popen.pid)
            self._popen.wait()
            self._directory.cleanup()
            atexit.unregister(self.close)


def flags(options: dict[str, Any]) -> list[str]:
    given = []
    for name, value in options.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            given.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            given += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return given


def _request(request: urllib.request.Request, timeout: float) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
