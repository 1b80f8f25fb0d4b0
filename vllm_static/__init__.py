"""The vLLM plugin: a structured-output backend called `static` whose grammar is a finite item set."""

from typing import Any


def refresh(llm: Any, name: str | None = None) -> list[dict[str, Any]]:
    """Take up what is current of the published sets of a vLLM `LLM`, or of one of them; nothing follows them offline.

    Returns, for each, what `GET /v1/item_sets` tells. Raises ItemSetError: no such set, or a version that cannot be
    served.
    """
    from vllm_static.front.front_end import refresh

    return refresh(llm, name)
