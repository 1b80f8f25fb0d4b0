"""The audit log of answers: lines of JSON without any user's text. A thread writes them: no answer waits for a disk."""

import atexit
import logging
import math
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache, partial
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Queue
from typing import Any, cast

import msgspec

from itemset.errors import ItemSetError
from itemset.serving import metrics
from itemset.serving.front.answer_fields import ExpectedItems
from itemset.serving.wire import LOGPROBS, VIEW, version_of

SIZE, FILES = 100_000_000, 10  # bytes of a file, and files of a process: the oldest one makes room
WAITING, MOST_ID = 1_000, 256  # lines that wait for the disk, and characters of a request id, which clients may choose
_OF_ITEM = ("set", "key", "score", "set_weight")  # what is logged of what an answer says of an item

log: QueueHandler | None = None  # of this process


def begin(folder: str, model: str, logger: logging.Logger) -> None:
    """Log this process's answers from now on. model: their server's. Raises ItemSetError for a bad folder."""
    global log
    its = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"  # containers may share the first two
    path = Path(folder).expanduser() / f"answers-{its}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("wb", buffering=0) as file:  # a full disk is seen when it is written to
            file.write(b"\n")
            file.truncate(0)
        to_file = _File(path, "a", SIZE, FILES - 1, "utf-8")
    except OSError as error:
        message = f"item_set_audit_log: no line can be written into {folder!r} ({error}): name a folder with room"
        raise ItemSetError(f"{message} that this user may write to") from error
    message = "The audit log %s loses lines, this is said once: see to the disk, and count the lines of its files"
    say = cache(partial(logger.error, message, path, exc_info=True))
    log = QueueHandler(waiting := Queue[Any](WAITING))
    log.format = partial(_line, model)  # type: ignore[method-assign]
    log.handleError = to_file.handleError = lambda record: say()  # type: ignore[method-assign]
    listener = QueueListener(log.queue, to_file)
    listener.enqueue_sentinel = partial(waiting.put, None, timeout=10)  # type: ignore[method-assign]
    listener.start()
    atexit.register(listener.stop)


class _File(RotatingFileHandler):
    """Begins a new file where somebody has moved or deleted the last one."""

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 - `emit` catches what fails in it
        if not os.path.exists(self.baseFilename):
            self.close()
        return bool(super().shouldRollover(record))


def answered(request_id: str, adapter: str | None, of: Any, told: Mapping[str, Any]) -> None:
    """Log an answer that has ended. A thought is none, but its list is.

    adapter: in place of the model. of: an `Expected`, `ExpectedItems` or `ListJob`. told: the answer's fields.
    """
    if log is not None and ("item" in told or told.get("items") is not None):
        log.handle(logging.makeLogRecord({"args": (request_id, adapter, of, told)}))


def _line(model: str, record: logging.LogRecord) -> str:
    """Return an answer's line. The handler catches what fails here: an engine's loop over all answers goes on."""
    request_id, adapter, of, told = cast(Any, record.args)
    given = [told["item"]] if "item" in told else told["items"]
    scored = [{"score": item["logprob"], **item} if "logprob" in item else item for item in given if item]
    items = [{name: item[name] for name in _OF_ITEM if name in item} for item in scored]
    if logs := told.get(LOGPROBS):
        items = [{**item, "score": math.fsum(logs["log_p"])} for item in items]
    sets = list[dict[str, Any]]()
    for reference in [one.reference for one in (of.constraint.sets if isinstance(of, ExpectedItems) else [of])]:
        version, name = version_of(reference)
        parts = [one.removeprefix(VIEW) for one in reference.split("@") if one.startswith(VIEW)]  # no name has a colon
        sets.append({"name": metrics.label(name), "version": version or None, "filters": parts[::-1]})
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "id": request_id[:MOST_ID]}
    return msgspec.json.encode({**line, "model": adapter or model, "sets": sets, "items": items}).decode()
