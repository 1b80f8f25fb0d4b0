"""SGLang's real HTTP server for tests, on a CPU.

server = Server(model, grammar_backend="xgrammar")
status, body = server.post("/generate", {"text": "Once upon a time", "sampling_params": {"regex": "[0-9]+"}})
answer = server.client.completions.create(model=server.model_name, prompt="Once upon a time")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from servers import EngineServer, flags
from sglang_engines import FAST, environment, host


class Server(EngineServer):
    """SGLang's, on a CPU. False, too, drops one of the defaults."""

    module = "sglang.launch_server"
    # Else every look at the server's health generates a token, and takes a second.
    more: ClassVar[dict[str, str]] = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    host, environment = staticmethod(host), staticmethod(environment)

    @classmethod
    def flags_of(cls, model: Path | str, port: int, options: dict[str, Any]) -> list[str]:
        own = {"model_path": str(model), "served_model_name": cls.model_name, "host": "127.0.0.1", "port": port}
        return flags({name: value for name, value in (own | FAST | options).items() if value is not False})


start_expecting_failure = Server.fail
