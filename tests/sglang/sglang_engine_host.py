"""The child's side of `sglang_engines.Engine` and `sglang_servers.Server`: a process that has SGLang imported and forks
a fresh engine or server whenever it is asked."""

from __future__ import annotations

import socket
import sys
from functools import partial

import engine_host
import spares
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.models import registry  # noqa: F401  with all its models

SPARES = 3  # for the schedulers of two ranks and the detokenizer

if __name__ == "__main__":
    engine_host.load_compiled()
    serve = partial(spares.serve, count=SPARES, module="sglang.launch_server", make_engine=Engine)
    engine_host.host(socket.socket(fileno=int(sys.argv[1])), serve)
