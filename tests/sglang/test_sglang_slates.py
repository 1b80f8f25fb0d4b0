"""Slates on SGLang's device path: the answers of the host path, told alike, also after they were retracted."""

from __future__ import annotations

from typing import Any

import pytest
from slate_tests import *  # noqa: F403 - its tests, with the engines of this module
from slate_tests import check_distinct, slate, told

DELAYED = "a sampling was delayed"  # cpu/sitecustomize.py


@pytest.fixture
def start(engines, tiny_model, sets_of_slates):
    def start(path: str, **more: Any) -> Any:
        return engines(tiny_model, grammar_backend="static", item_sets=sets_of_slates, item_set_path=path, **more)

    return start


@pytest.fixture
def others():
    return []  # a grammar would make samplings wait


@pytest.fixture
def host_path_taken():
    """How often a sampling waited for the host."""
    return lambda engine: engine.log().count(DELAYED)


def test_retracted_slates_begin_anew(start):
    """They walk their output again, into an empty list; the kernels are Triton's."""
    words, prompts = slate("fixed", 20, separator=""), [f"slate {i}" for i in range(16)]
    short = {"max_total_tokens": 450, "schedule_conservativeness": 0.01, "item_set_kernels": "triton"}
    roomy, tight = start("device"), start("device", **short)
    expected, found = (engine.ask(prompts, words) for engine in (roomy, tight))
    assert "Retract requests" in tight.log()
    assert told(found) == told(expected)
    for answer in expected:
        check_distinct(answer, 20)
