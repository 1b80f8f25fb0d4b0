"""The vLLM plugin: a structured-output backend called `static` whose grammar is a finite item set."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_static.front.list_requests import DrawParams, RankingParams

__all__ = ["DrawParams", "RankingParams", "refresh"]


def refresh(llm: Any, name: str | None = None) -> list[dict[str, Any]]:
    """Take up what is current of the published sets of a vLLM `LLM`, or of one of them; nothing follows them offline.

    Returns, for each, what `GET /v1/item_sets` tells. Raises ItemSetError for no such set, or an unservable version.
    """
    from itemset.errors import ItemSetError
    from vllm_static import compat
    from vllm_static.metrics import ROLLOUT

    front, core = llm.llm_engine.input_processor.static_front_end, llm.llm_engine.engine_core
    if front is None:
        raise ItemSetError("this engine has no item sets: start it with the structured-outputs backend static")
    if llm.llm_engine.is_sleeping():
        raise ItemSetError("the engine sleeps, and opens no versions: call wake_up() before refresh()")
    follower = front.follower or front.follow(lambda message: [compat.ask(core, ROLLOUT, message)])
    return follower.refreshed(name)


def __getattr__(name: str) -> Any:
    """Import what needs vLLM once it is asked for: this package is imported while vLLM itself is."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_static.front import list_requests

    return getattr(list_requests, name)
