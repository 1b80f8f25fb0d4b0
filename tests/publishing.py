"""Publications that are killed at every line of the code that makes them, and what each of them leaves.

Run as a program, this file forks the publishers: all is imported and compiled then, so that thousands take seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import itemset
from itemset import published, storage
from itemset.trie import file as index_file

INDEXES = {name: [[number, 1], [number, 2, 3]] for number, name in enumerate("abcd")}


def indexes(folder: Path) -> dict[str, Path]:
    """Index files of different sets, by a letter."""
    for name, items in INDEXES.items():
        itemset.build(items).save(folder / f"{name}.itemset")
    return {name: folder / f"{name}.itemset" for name in INDEXES}


def names(folder: Path) -> set[str]:
    """The files of a published set, but for those that are always there."""
    return {path.name for path in folder.iterdir()} - {published.POINTER, "lock"}


def kill_at_every_line() -> Counter[str]:
    """Run this file as a program. Returns how often each end was seen; raises AssertionError with its traceback."""
    environment = os.environ | {"PYTHONPATH": str(Path(itemset.__file__).parents[1])}
    run = subprocess.run([sys.executable, __file__], env=environment, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    return Counter({line.partition("\t")[0]: int(line.partition("\t")[2]) for line in run.stdout.splitlines()})


def _killed(work: Callable[[], Any], line: int) -> bool:
    """Fork a process that kills itself at this line of the files below as it does the work. Was it killed?"""
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL)
        return status != 0
    left = line
    files = {published.__file__, storage.__file__, index_file.__file__}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files or frame.f_code.co_name in ("version", "_parse_header"):
            return None  # it only reads
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        work()
        sys.settrace(None)
        os._exit(0)
    finally:
        os._exit(1)


def _each_line(before: Path, folder: Path, work: Callable[[], Any], then: Callable[[], str]) -> Counter[str]:
    """Kill `work` at each of its lines in turn, on a copy of the folder `before` each time, and see what is left."""
    seen: Counter[str] = Counter()
    for line in range(10_000):
        shutil.rmtree(folder, ignore_errors=True)
        if before.exists():
            shutil.copytree(before, folder)
        killed = _killed(work, line)
        seen[then()] += 1
        if not killed:
            return seen
    raise AssertionError("it does not end")


def _main(work: Path) -> None:
    files, folder, before = indexes(work), work / "set", work / "before"
    version = {name: index_file.version(path) for name, path in files.items()}
    letter = {value: key for key, value in version.items()}

    def now() -> str:
        current = published.current(folder)
        assert itemset.verify(current.path).items() == sorted(INDEXES[letter[current.name]])
        return letter[current.name]

    def publish_again(name: str) -> None:
        """Whatever was left, the next publications work, and leave nothing but the versions that are kept."""
        for one in (name, "d"):
            assert published.publish(files[one], folder, keep=2).name == version[one]
        assert names(folder) == {f"{version[one]}.itemset" for one in (name, "d")}

    def none_or_new() -> str:
        found = now() if (folder / published.POINTER).exists() else "none"
        publish_again("a")
        return f"first: {found}"

    def old_or_new() -> str:
        found, history = now(), [letter[one.name] for one in published.versions(folder)]
        assert history == {"b": ["b", "a"], "c": ["c", "b"]}[found]
        publish_again("c")
        return f"next: {found}"

    def one_or_other() -> str:
        found, history = now(), [letter[one.name] for one in published.versions(folder)]
        assert history == {"b": ["b", "a"], "a": ["a", "b"]}[found]
        publish_again("c")
        return f"rollback: {found}"

    seen = _each_line(before, folder, lambda: published.publish(files["a"], folder), none_or_new)
    published.publish(files["a"], before)
    published.publish(files["b"], before)
    seen += _each_line(before, folder, lambda: published.publish(files["c"], folder, keep=2), old_or_new)
    seen += _each_line(before, folder, lambda: published.rollback(folder), one_or_other)
    for end, times in seen.items():
        print(end, times, sep="\t")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        _main(Path(temporary))
