"""The entry point of the plugin, and the features that have hooks. Deleting a feature's files takes it out."""

import os
import sys

from itemset.serving.config import BACKEND
from itemset.serving.hooks import import_present
from sglang_static import compat, engine_config

import_present(
    "sglang_static",
    "front.answers", "front.request_hooks", "scheduler.drafts", "scheduler.hooks", "scheduler.list_hooks",
    "scheduler.turns", "scheduler.versions", "scheduler.weights",
)  # fmt: skip

_NAMED = {BACKEND, f"--grammar-backend={BACKEND}", "--guided-decoding-backend"}  # words of flags that want our backend


def register() -> None:
    """Entry point `sglang.srt.plugins`: runs in every process of SGLang. An unsupported version, or one that lacks a
    hook, goes on without our backend. An engine that wants it would answer freely then: its process ends by SystemExit.
    """
    hook = compat.hook
    hook.asked = hook.asked or compat.VARIABLE in os.environ or not _NAMED.isdisjoint(sys.argv)
    try:
        compat.install()
        engine_config.add_backend_name()
    except RuntimeError as error:
        if hook.asked:
            raise SystemExit(str(error)) from error
        hook.give_up(error)
