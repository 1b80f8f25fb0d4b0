"""A folder for temporary files that goes away however the process ends: a second process waits for the end.

Run as a program, this file is that second process. It imports nothing of the package, to start in milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DONE = b"done"


@contextmanager
def scratch_folder(output: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder beside the file `output`, for what is needed until that file is written.

    It is removed when the block ends, and also if this process is killed before: then a line on stderr says whether
    `output` was written, or how to go on. Raises OSError if no folder can be made there.
    """
    output = Path(output).absolute()
    # A session of its own: Ctrl-C and a closing terminal end this process, not the one that cleans up.
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # what a guard that has gone could not take is not tried again when its pipe is closed
        start_new_session=True,
    )
    assert guard.stdin is not None
    assert guard.stdout is not None
    with guard:
        try:
            error, _, folder = guard.stdout.readline().rstrip(b"\n").partition(b" ")
            if not folder:
                raise OSError(int(error or 0), os.strerror(int(error or 0)))
            try:
                yield Path(os.fsdecode(folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            with suppress(BrokenPipeError):  # of a guard that could make no folder, or was killed
                guard.stdin.write(_DONE)


def state_of(output: str | os.PathLike[str]) -> os.stat_result | None:
    """Return what file is at `output`, for `outcome`; None if there is none."""
    try:
        return os.stat(output)
    except OSError:
        return None


def outcome(output: str | os.PathLike[str], before: os.stat_result | None) -> str:
    """Say whether a build that was ended put its file at `output`, or else how to go on.

    before: what `state_of` returned at its start. Files are put in place at once: one that is there is whole.
    """
    now = state_of(output)
    if now is not None and (before is None or not os.path.samestat(now, before)):
        return f"{output} was written whole"
    return "nothing was written: run the same command again"


def _guard(output: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the process that it watches, by itself
    before = state_of(output)
    try:
        folder = tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".building", dir=output.parent)
    except OSError as error:
        os.write(1, b"%d \n" % (error.errno or 0))
        return
    try:
        with suppress(BrokenPipeError):  # it was killed already
            os.write(1, b"0 " + os.fsencode(folder) + b"\n")
        # Ends at the end of the other process, too: the system closes the pipe.
        ended_well = sys.stdin.buffer.read() == _DONE
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not ended_well:
        output.with_name(f".{output.name}.tmp").unlink(missing_ok=True)
        print(f"itemset: the build was killed, {outcome(output, before)}", file=sys.stderr)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
