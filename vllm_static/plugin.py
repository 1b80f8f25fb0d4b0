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

    Raises RuntimeError for a vLLM version that is not supported, or that lacks one of the hooks.
    """
    compat.install(START, IMPORTED)
