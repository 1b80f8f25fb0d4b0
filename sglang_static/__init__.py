"""The SGLang plugin: `--grammar-backend static`, whose grammar is a finite item set."""

from typing import Any


def refresh(engine: Any, name: str | None = None) -> list[dict[str, Any]]:
    """Take up what is current of the published sets of an `sglang.Engine`, or of one of them.

    It follows them only while it answers requests. Returns, for each, what `GET /v1/item_sets` tells. Raises
    ItemSetError: no such set, or a version that cannot be served.
    """
    from sglang_static.front.version_watcher import refresh

    return refresh(engine, name)
