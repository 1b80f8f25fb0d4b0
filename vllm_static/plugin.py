"""The entry points of the plugin."""

from itemset.serving.hooks import IMPORTED, START

from vllm_static import (  # noqa: F401 - modules with hooks  # isort: skip
    answers, child_sampling, compat, core_hooks, draft_head_requests, engine_config, legal_mass, model_runner_v1,
    narrow_hooks, request_hooks, speculation, step_list_hooks, weight_updates,
)  # fmt: skip


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
