"""The vLLM plugin: a structured-output backend called `static` whose grammar is a finite item set."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_static.front.list_requests import DrawParams, RankingParams

__all__ = ["DrawParams", "RankingParams", "refresh"]


def refresh(llm: Any, name: str | None = None) -> list[dict[str, Any]]:
    """Take up what is current of the published sets of a vLLM `LLM`, or of one of them; nothing follows them offline.

    Returns, for each, what `GET /v1/item_sets` tells. Raises ItemSetError: no such set, or a version that cannot be
    served.
    """
    from vllm_static.front.front_end import refresh

    return refresh(llm, name)


def __getattr__(name: str) -> Any:
    """Import what needs vLLM once it is asked for: this package is imported while vLLM itself is."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_static.front import list_requests

    return getattr(list_requests, name)
