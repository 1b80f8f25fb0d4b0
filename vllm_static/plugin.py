"""The entry points of the plugin, and the features that have hooks. Deleting a feature's files takes it out."""

import wrapt

from itemset.serving.hooks import IMPORTED, START, import_present
from vllm_static import compat, engine_config

import_present(
    "vllm_static",
    "core.device_path", "core.draft_head", "core.drafts", "core.hooks", "core.lists", "core.thoughts", "front.answers",
    "front.request_hooks", "v1.model_runner", "worker.child_sampling", "worker.drafts", "worker.hooks",
    "worker.list_hooks", "worker.narrow_hooks", "worker.weights",
)  # fmt: skip


def register_early() -> None:
    """Entry point `vllm.platform_plugins`: runs while vLLM is being imported, and names no platform.

    `LLM(structured_outputs_config={"backend": "static"})` checks the name before it loads the general plugins
    (entrypoints/llm.py).
    """
    wrapt.register_post_import_hook(engine_config.add_backend_name, "vllm.config.structured_outputs")


def register() -> None:
    """Entry point `vllm.general_plugins`: runs in every process of vLLM, more than once.

    An unsupported vLLM, or one that lacks a hook, goes on without our backend. Raises RuntimeError if that is wanted.
    """
    try:
        compat.install(START, IMPORTED)
    except RuntimeError as error:
        compat.hook.give_up(error)
