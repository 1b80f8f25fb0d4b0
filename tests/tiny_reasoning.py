"""A reasoning parser for the tiny model, whose marks are two of its ordinary tokens (--reasoning-parser-plugin)."""

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser


@ReasoningParserManager.register_module("tiny")
class TinyReasoningParser(BaseThinkingReasoningParser):
    @property
    def start_token(self) -> str:
        return "letter"

    @property
    def end_token(self) -> str:
        return "station"
