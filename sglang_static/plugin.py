"""The entry point of the plugin."""

import os
import sys

from itemset.serving.config import BACKEND
from sglang_static import compat, engine_config
from sglang_static.front import answers, request_hooks  # noqa: F401 - modules with hooks, as all below
from sglang_static.scheduler import drafts, hooks, turns, versions, weights  # noqa: F401

_NAMED = {BACKEND, f"--grammar-backend={BACKEND}", "--guided-decoding-backend"}
"""Words of a command line that want our backend."""


def register() -> None:
    """Entry point `sglang.srt.plugins`: runs in every process of SGLang.

    A SGLang version that is not supported, or that lacks a hook, goes on without our backend. An engine that wants it
    would answer freely then: its process ends by SystemExit.
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
