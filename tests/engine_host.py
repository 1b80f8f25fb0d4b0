"""The child's side of `engines.Engine` and `servers.Server`: a process that has vLLM imported and forks a fresh engine
or server whenever it is asked.

Importing vLLM takes six seconds and starting a tiny engine one, so the import is paid once per model runner. Plugins
are loaded after the fork, as in any program that uses vLLM. Servers that are not forked import all in its usual order.
`sglang/sglang_engine_host.py` does the same for SGLang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import further  # noqa: F401  what hooks are given

SPARES = 3  # for two ranks; or for an engine core and two API servers


def host(control: socket.socket, serve_engine: Callable[[Connection], None]) -> None:
    """Fork a process for each pair of file descriptors (its connection, its log) that arrives, until the other side
    closes. `serve_engine` runs there."""
    # Nobody waits for the engines here: their connections tell when they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Left to the garbage collector, the imported modules cost every engine a second or two, and a copy of their memory.
    gc.collect()
    gc.freeze()
    while (message := socket.recv_fds(control, 1, 2))[0]:
        connection, log = message[1]
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(log, sys.stdout.fileno())
            os.dup2(log, sys.stderr.fileno())
            faulthandler.enable()
            # The other side sends this signal to a hanging engine before it kills it, for the log.
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            try:
                serve_engine(Connection(connection))
            except SystemExit as end:
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                # The usual way out would run the exit handlers that belong to the host.
                os._exit(0)
        os.close(connection)
        os.close(log)


def load_compiled() -> None:
    """Load from Numba's cache what every engine runs: it takes a second. What is not there is compiled."""
    from itemset.serving.warm_up import compile_all

    compile_all()


def serve(connection: Connection, make_engine: Callable[..., Any]) -> None:
    """Answer requests until the other side closes. The first one starts the engine, the others run a function on it."""
    engine: Any = None

    def start(environment: dict[str, str], prepare: Callable[[], None] | None, arguments: dict[str, Any]) -> None:
        nonlocal engine
        os.environ.update(environment)
        if prepare is not None:
            prepare()
        engine = make_engine(**arguments)

    connection.send(os.getpid())
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(message)
            answer = (start(*arguments) if function is None else function(engine, *arguments)), None
            encoded = cloudpickle.dumps(answer)
        except Exception as error:
            traceback.print_exc()
            encoded = cloudpickle.dumps(((_portable(error), traceback.format_exc()), "error"))
        connection.send_bytes(encoded)


def _portable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else one of its nearest built-in type with the same text."""
    try:
        if type(pickle.loads(cloudpickle.dumps(error))) is type(error):
            return error
    except Exception:
        for base in type(error).__mro__:
            if base.__module__ == "builtins" and base is not Exception:
                try:
                    return base(str(error))
                except TypeError:
                    continue
    return RuntimeError("".join(traceback.format_exception_only(type(error), error)))


if __name__ == "__main__":
    import spares
    from vllm import LLM
    from vllm.model_executor.models import registry
    from vllm.v1.worker import cpu_worker  # noqa: F401  with the models and their layers

    for of_servers in ("app", "cli_args", "api_server.app_state", "api_server.entry"):
        with contextlib.suppress(ModuleNotFoundError):  # 0.33 has no `cli_args`
            importlib.import_module(f"vllm.entrypoints.launchers.{of_servers}")

    # vLLM looks at each kind of model in an interpreter of its own, so that CUDA stays untouched: ten seconds each.
    registry._run_in_subprocess = lambda look: look()
    load_compiled()
    module = "vllm.entrypoints.openai.api_server"
    host(socket.socket(fileno=int(sys.argv[1])), partial(spares.serve, count=SPARES, module=module, make_engine=LLM))
