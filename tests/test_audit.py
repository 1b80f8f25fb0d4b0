"""The audit log of answers: its lines, its rotation, and disks that take none. Real servers' are in `server_tests`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pages
import pytest

from itemset.cli import bench
from itemset.errors import ItemSetError
from itemset.serving.config import StaticConfig
from itemset.serving.front import audit
from itemset.serving.front.answer_fields import ExpectedItems

LOGGER = logging.getLogger("test_audit")


def of(reference: str) -> Any:
    """What holds the reference of an answer's set."""
    return SimpleNamespace(reference=reference)


FILMS = of("version:5f0c@films")


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    yield
    audit.log = None


def written(folder: Path) -> list[Any]:
    """All lines, once the thread has written them, by files."""
    assert audit.log is not None
    audit.log.queue.join()
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_bytes().splitlines()]


def test_a_full_disk_with_room_again(tmp_path):
    """The stream of a deleted file still has what found no room. Its end is no end of the log."""
    audit.begin(str(tmp_path), "tiny", LOGGER)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.symlink_to("/dev/full")
    audit.answered("lost", None, FILMS, {"item": {"key": 1}})
    audit.log.queue.join()
    path.unlink()
    for i in range(3):
        audit.answered(str(i), None, FILMS, {"item": {"key": i}})
    assert [line["id"] for line in written(tmp_path)][-2:] == ["1", "2"]


def test_a_line_says_which_items_and_no_text(tmp_path):
    audit.answered("before", None, FILMS, {"item": {"key": 1}})  # off by default
    assert StaticConfig.of({}).item_set_audit_log is None
    audit.begin(str(tmp_path / "audit"), "tiny", LOGGER)
    audit.answered("a", None, FILMS, {"item": {"key": "é", "attributes": {"year": 1979}, "set_weight": -0.5}})
    audit.answered("b", "adapter", of("view:22@view:11@form:33@version:5f0c@a@b"), {"item": None})
    both = ExpectedItems(SimpleNamespace(sets=[FILMS, of("inline:44")]), None, None, frozenset())
    inside = [{"text": "Alien", "path": "$.film", "set": "films", "key": 7}, {"text": "red", "key": 0}]
    audit.answered("c", None, both, {"items": inside})
    logs = {"log_p": [-1.5, -0.25], "log_q": [0.0, 0.0]}
    audit.answered("d" * 1_000, None, of("view:55@inline:44"), {"item": {"key": 3}, "item_logprobs": logs})
    audit.answered("e", None, FILMS, {"items": [{"key": 2, "keys": [2], "score": -1.0, "proven": True}]})
    drawn = [{"draw": 1, "key": 5, "logprob": -2.0}, {"draw": 2, "key": 5, "logprob": -2.0}]
    audit.answered("draws", None, FILMS, {"items": drawn})
    audit.answered("f", None, FILMS, {"thought": object()})  # its list is another answer
    audit.answered("g", None, FILMS, {"items": None})  # it has found no end
    lines = written(tmp_path / "audit")
    assert all(line.pop("time").endswith("+00:00") for line in lines)
    films, inline = {"name": "films", "version": "5f0c", "filters": []}, {"name": "inline", "version": None}
    assert lines == [
        {"id": "a", "model": "tiny", "sets": [films], "items": [{"key": "é", "set_weight": -0.5}]},
        {
            "id": "b",
            "model": "adapter",
            "sets": [{"name": "a@b", "version": "5f0c", "filters": ["11", "22"]}],
            "items": [],
        },
        {
            "id": "c",
            "model": "tiny",
            "sets": [films, inline | {"filters": []}],
            "items": [{"set": "films", "key": 7}, {"key": 0}],
        },
        {
            "id": "d" * 256,
            "model": "tiny",
            "sets": [inline | {"filters": ["55"]}],
            "items": [{"key": 3, "score": -1.75}],
        },
        {"id": "e", "model": "tiny", "sets": [films], "items": [{"key": 2, "score": -1.0}]},
        {"id": "draws", "model": "tiny", "sets": [films], "items": [{"key": 5, "score": -2.0}] * 2},
    ]


def test_files_are_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "SIZE", 1_000)
    monkeypatch.setattr(audit, "FILES", 3)
    audit.begin(str(tmp_path), "tiny", LOGGER)
    for i in range(100):
        audit.answered(str(i), None, FILMS, {"item": {"key": i}})
    lines = written(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl", ".1", ".2"}
    assert all(path.stat().st_size <= 1_000 for path in tmp_path.iterdir())
    assert sorted(line["items"][0]["key"] for line in lines) == [*range(100 - len(lines), 100)]


def test_processes_that_call_themselves_the_same_have_files_of_their_own(tmp_path):
    """As in containers of one host name, over one folder."""
    for model in ("one", "other"):
        audit.begin(str(tmp_path), model, LOGGER)
        audit.answered("a", None, FILMS, {"item": None})
        assert audit.log is not None
        audit.log.queue.join()
    assert [line["model"] for line in sorted(written(tmp_path), key=lambda line: line["model"])] == ["one", "other"]
    assert len([*tmp_path.iterdir()]) == 2


def test_a_folder_that_takes_no_line_is_an_error_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(audit.secrets, "token_hex", lambda count: "00" * count)
    (tmp_path / "file").write_text("")
    full = tmp_path / "full"
    full.mkdir()
    audit.begin(str(full), "tiny", LOGGER)
    (name,) = full.iterdir()
    written(full)
    name.unlink()
    name.symlink_to("/dev/full")
    for folder, why in (("file", "File exists"), ("none/there", "No such file"), ("full", "No space left")):
        with pytest.raises(ItemSetError, match=f"item_set_audit_log: no line can be written into .*{why}.*: name a"):
            audit.begin(str(tmp_path / folder), "tiny", LOGGER)


def test_lines_and_a_log_of_requests_make_a_replay(tmp_path, monkeypatch):
    """As the page has it."""
    (block,) = [
        block for kind, block in pages.site()["deployment.md"] if kind == "python" and "requests.jsonl" in block
    ]
    audit.begin(str(tmp_path / "audit"), "tiny", LOGGER)
    answer = [{"key": 183, "score": -2.5}]
    audit.answered("cmpl-1-0", None, FILMS, {"items": answer})
    audit.answered("chatcmpl-2", None, FILMS, {"item": {"key": 12}})
    audit.answered("cmpl-3\x85-0", None, FILMS, {"item": {"key": 1}})  # which some take for the end of a line
    audit.answered("cmpl-3\x85-0", None, FILMS, {"item": {"key": 183}})
    written(tmp_path / "audit")
    body = {"prompt": "A film: ", "item_set": "films"}
    asked = [{"id": name, "body": body, "truth": [183]} for name in ("chatcmpl-2", "refused", "cmpl-1", "cmpl-3\x85")]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in asked))
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    users = bench._users(argparse.Namespace(replay="replay.jsonl", users=None, requests=None))
    assert [user["answer"] for user in users] == [[{"key": 12}], answer, [{"key": 1}, {"key": 183}]]
    lists = [[(one["key"], None) for one in user["answer"]] for user in users]
    assert bench.shares(users, lists)["recall"] == pytest.approx(2 / 3)


def test_a_disk_that_fills_up_later_is_said_once(tmp_path, caplog):
    audit.begin(str(tmp_path), "tiny", LOGGER)
    (path,) = tmp_path.iterdir()
    (its,) = (int(one) for one in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{one}") == str(path))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, its)
    os.close(full)
    for i in range(3):
        audit.answered(str(i), None, FILMS, {"item": {"key": i}})
    assert written(tmp_path) == []
    (said,) = caplog.records
    assert f"The audit log {path} loses lines" in said.getMessage()
    assert "No space left" in caplog.text


def test_an_answer_that_cannot_be_written_down_is_said_once_and_ends_nothing(tmp_path, caplog):
    audit.begin(str(tmp_path), "tiny", LOGGER)
    for _ in range(2):
        audit.answered("a", None, object(), {"item": {"key": 1}})  # what has no set
    audit.answered("b", None, FILMS, {"item": {"key": 2}})
    assert [line["id"] for line in written(tmp_path)] == ["b"]
    (said,) = caplog.records
    assert "loses lines" in said.getMessage()
    assert "has no attribute 'reference'" in caplog.text


def test_lines_that_wait_for_the_disk_at_the_end_are_written(tmp_path, monkeypatch, caplog):
    goes_on, emit, at_exit = threading.Event(), audit.RotatingFileHandler.emit, list[Any]()

    def slow(handler: Any, record: Any) -> None:
        assert goes_on.wait(60)
        emit(handler, record)

    monkeypatch.setattr(audit.RotatingFileHandler, "emit", slow)
    monkeypatch.setattr(audit.atexit, "register", at_exit.append)
    monkeypatch.setattr(audit, "WAITING", 2)
    audit.begin(str(tmp_path), "tiny", LOGGER)
    assert audit.log is not None
    audit.answered("0", None, FILMS, {"item": None})
    while not audit.log.queue.empty():  # until the thread waits for the disk with it
        time.sleep(0.01)
    for i in range(1, 5):
        audit.answered(str(i), None, FILMS, {"item": None})
    (said,) = caplog.records
    assert "loses lines" in said.getMessage()
    threading.Timer(0.1, goes_on.set).start()
    (stop,) = at_exit
    stop()
    (path,) = tmp_path.iterdir()
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["0", "1", "2"]
