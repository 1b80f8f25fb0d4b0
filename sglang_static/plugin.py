"""The entry point of the plugin."""

import os

from sglang_static import (  # noqa: F401 - modules with hooks  # isort: skip
    answers, compat, engine_config, legal_mass, request_hooks, scheduler_hooks, speculation, turns, version_watcher,
)  # fmt: skip


def register() -> None:
    """Entry point `sglang.srt.plugins`: runs in every process of SGLang.

    Raises RuntimeError for a SGLang version that is not supported, or lacks a hook: SGLang logs it, and goes on without
    the backend. An engine that has chosen it would answer freely then: its process ends by SystemExit.
    """
    try:
        compat.install()
        engine_config.add_backend_name()
    except RuntimeError as error:
        if compat.VARIABLE in os.environ:
            raise SystemExit(str(error)) from error
        raise
