"""The SGLang plugin: `--grammar-backend static`, whose grammar is a finite item set."""

import asyncio
from typing import Any


def refresh(engine: Any, name: str | None = None) -> list[dict[str, Any]]:
    """Take up what is current of an `sglang.Engine`'s published sets, or of one: it follows them only while it answers
    requests. Returns, for each, what `GET /v1/item_sets` tells. Raises ItemSetError for no such set, or a version that
    cannot be served."""
    from itemset.errors import ItemSetError
    from sglang_static import compat

    async def refreshed() -> list[dict[str, Any]]:
        if (follower := compat.follower_of(engine.tokenizer_manager)) is None:
            raise ItemSetError("this engine has no item sets: start it with grammar_backend='static'")
        return await asyncio.to_thread(follower.refreshed, name)

    return engine.loop.run_until_complete(refreshed())
