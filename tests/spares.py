"""Processes forked beforehand, which become those that an engine starts: so these need not import it again.

Importing an engine takes up to ten seconds, in its own process and again in each that it starts, and all the rest one.
So before anything happens in an engine's process, it forks some more. They wait until the engine starts a process, and
then become that: with the same environment, arguments and file descriptors, they run what a new interpreter would run.
"""

from __future__ import annotations

import fcntl
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import engine_host

MESSAGE = 1 << 17  # bytes; the environment is the most of it


def serve(connection: Connection, count: int, module: str, make_engine: Callable[..., Any]) -> None:
    """Do `engine_host.serve` with so many spares. With the argument `server`, a list of flags, it runs the server that
    is this module instead, until the other side closes."""
    _take_spares(connection, count)

    def start(server: list[str] | None = None, **arguments: Any) -> Any:
        if server is None:
            return make_engine(**arguments)
        threading.Thread(target=_end_with, args=[connection], daemon=True).start()
        sys.argv[1:] = server
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        raise SystemExit

    engine_host.serve(connection, start)


def _end_with(connection: Connection) -> None:
    connection.poll(None)
    os.killpg(0, signal.SIGKILL)


def _take_spares(connection: Connection, count: int) -> None:
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        spares.append(_fork_spare([connection, *(control for _, control in spares)]))
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_spare(path: bytes, arguments: list[Any], fds: Sequence[int]) -> int:
        if not spares or arguments[-1] != "--multiprocessing-fork":
            return spawn(path, arguments, fds)
        pid, control = spares.pop()
        with control:
            message = pickle.dumps((dict(os.environ), arguments[-2:], list(fds)))
            socket.send_fds(control, [message], fds)
        return pid

    multiprocessing.util.spawnv_passfds = spawn_spare


def _fork_spare(not_its: list[Any]) -> tuple[int, socket.socket]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        its.close()
        return pid, ours
    status = 1
    try:
        for other in [ours, *not_its]:
            other.close()
        _become_what_is_asked(its)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become_what_is_asked(control: socket.socket) -> None:
    message, received, *_ = socket.recv_fds(control, MESSAGE, 16)
    if not message:
        return
    environment, (code, *arguments), numbers = pickle.loads(message)
    control.close()
    # The code to run names the file descriptors by the numbers that they have over there.
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1 << 9) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number, inheritable=False)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(code, {})
