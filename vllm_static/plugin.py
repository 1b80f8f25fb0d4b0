"""The entry points of the plugin."""

from itemset.serving.hooks import IMPORTED, START
from vllm_static import compat, engine_config
from vllm_static.core import draft_head, hooks, lists, thoughts  # noqa: F401 - modules with hooks, as all below
from vllm_static.front import answers, request_hooks  # noqa: F401
from vllm_static.v1 import model_runner  # noqa: F401
from vllm_static.worker import child_sampling, drafts, list_hooks, mask_hook  # noqa: F401

from vllm_static.worker import narrow_hooks, weight_updates, weights  # noqa: F401 # isort: skip


def register_early() -> None:
    """Entry point `vllm.platform_plugins`: runs while vLLM is being imported, and names no platform."""
    engine_config.add_backend_name_at_import()


def register() -> None:
    """Entry point `vllm.general_plugins`: runs in every process of vLLM, more than once.

    A vLLM version that is not supported, or that lacks one of the hooks, goes on without our backend. Raises
    RuntimeError if that is wanted.
    """
    try:
        compat.install(START, IMPORTED)
    except RuntimeError as error:
        compat.hook.give_up(error)
