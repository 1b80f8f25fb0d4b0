"""Bodies that no client should send, for the tests of both engines' servers."""

from __future__ import annotations

import json
from typing import Any

DEEP = '"x": ' + "[" * 100_000 + "]" * 100_000
NO_NAMES: list[Any] = [[], {}, 0, 1.5, True, "", "\0", "a" * 100_000, ["one"], {"a": {"b": []}}, "inline:00", "\ud800"]
NO_TEXTS: list[Any] = [[], {}, 3, "red", [None], [[]], [""], ["\ud800"], {"a": []}]

MEANT: list[dict[str, Any]] = [
    *({"item_set": name} for name in NO_NAMES),
    *({"structured_outputs": {"choice": texts}} for texts in NO_TEXTS),
    *({"guided_choice": texts} for texts in NO_TEXTS),
    *({place: {"item_set": []}} for place in ("vllm_xargs", "custom_params", "extra_body", "sampling_params")),
    {"vllm_xargs": {"item_set": {}}},
]
"""What stands in a body beside what its endpoint needs: a set is meant, and none is there to be had."""

NOISE: list[dict[str, Any]] = [
    {"item_set": "one", "tool_choice": 7},
    {"item_set": "one", "use_beam_search": True, "max_passes": []},
    {"item_set": "one", "use_beam_search": True, "exact": {}},
    {"item_set": "one", "max_tokens": "many"},
    {"item_set": "one", "structured_outputs": "red"},
    {"item_set": None},
    {"guided_choice": None, "structured_outputs": None},
    {"vllm_xargs": []},
    {"vllm_xargs": "item_set"},
    {"sampling_params": [None]},
    {"sampling_params": "item_set"},
    {"custom_params": ["item_set"]},
    {"extra_body": 7},
    {f"key{i}": i for i in range(5_000)},
]
"""The same, but no set is meant, or there is one."""

RAW: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"[[]]",
    b'"item_set"',
    b"NaN",
    b"7",
    b"[null, {}]",
    b'\xff\xfe{"item_set": "one"}',
    b'{"item_set": "\xff"}',
    b'{"item_set": "one"}\0',
    b'{"item_set": ' + b"[" * 100_000,
]


def members(*texts: str) -> list[str]:
    """JSON text to stand in a body that no `json.dumps` would make; a set is meant."""
    return ['"item_set": NaN', '"item_set": 1e999', f'"item_set": {"9" * 5_000}', f'"item_set": "one", {DEEP}', *texts]


def bodies(base: dict[str, Any]) -> list[tuple[bool, bytes]]:
    """Each body, and whether it means a set. base: what its endpoint needs."""
    beside = [(True, more) for more in MEANT] + [(False, more) for more in NOISE]
    text = json.dumps(base)[:-1]
    return [
        *((meant, json.dumps({**base, **more}).encode()) for meant, more in beside),
        *((True, f"{text}, {member}}}".encode()) for member in members('"item_set": "one", "item_set": "none"')),
        *((False, raw) for raw in RAW),
    ]
