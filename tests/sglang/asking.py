"""What tests ask SGLang for, and what they read out of its answers."""

from __future__ import annotations

from typing import Any

from engine_words import CITIES, EOS, prompts

__all__ = ["CITIES", "EOS", "answer", "inline", "named", "prompts"]


def named(name: str, **params: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "max_new_tokens": 20, "item_set": name} | params


def inline(choice: list[str], **params: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "max_new_tokens": 40, "choice": choice} | params


def answer(output: dict[str, Any]) -> tuple[int, ...]:
    """The tokens before the stop token."""
    tokens = tuple(output["output_ids"])
    return tokens[:-1] if tokens[-1] == EOS else tokens
