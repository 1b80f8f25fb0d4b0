"""Drafts from the target's hidden states, in the real SGLang engine: EAGLE, and heads that know half of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import EOS, answer, named, prompts
from draft_tests import NAMES, check_same, check_sampled, greedy, uneven
from pools import Pool
from sets import FIRST, LAST, NamedSet
from sglang_draft_models import EVEN, cached_sglang_eagle, cached_sglang_eagle3, token_map
from sglang_engines import draft_model

import itemset

STEPS = 3  # drafts of a chain
# The tokens that each kind of head can draft. -map: EAGLE with some tokens only, as a file says. -tree: in trees.
KNOWN: dict[str, Container[int]] = {"eagle": range(LAST), "eagle3": EVEN, "eagle-map": EVEN, "eagle-tree": range(LAST)}

Start = Callable[..., Any]
Outputs = list[dict[str, Any]]


# With the scope of a module, pytest runs all tests of a kind before the next: the pool keeps one engine.
every_kind = pytest.mark.parametrize("kind", KNOWN, scope="module")


@pytest.fixture(scope="session")
def lone(tmp_path_factory: pytest.TempPathFactory) -> NamedSet:
    """A set in which the first token says all that follows."""
    random = np.random.default_rng(5)
    items = [(first, *random.integers(FIRST, LAST, first % 13).tolist()) for first in range(FIRST, FIRST + 400)]
    path = tmp_path_factory.mktemp("lone") / "lone.itemset"
    itemset.build(map(list, items)).save(path)
    return NamedSet(str(path), frozenset(items))


@pytest.fixture(scope="session")
def start(engines: Pool[Any], tiny_model: Path, files: dict[str, Any], lone: NamedSet) -> Start:
    """`start(**arguments)`: an engine that works as on a GPU, where it speculates ahead of what it has seen."""

    def start(**arguments: Any) -> Any:
        return engines(
            tiny_model,
            grammar_backend="static",
            item_sets=files["item_sets"] | {"lone": lone.path},
            item_set_path="device",
            chunked_prefill_size=32,
            env={"TESTS_SGLANG_OVERLAP": "1"},
            **arguments,
        )

    return start


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a token map."""
    return token_map(tmp_path_factory.mktemp("map") / "even.pt")


@pytest.fixture
def speculating(kind: str, start: Start, tiny_model: Path, half: Path) -> Any:
    head = (cached_sglang_eagle3 if kind == "eagle3" else cached_sglang_eagle)(tiny_model)
    arguments = draft_model(head, topk=2 if kind == "eagle-tree" else 1)
    arguments["speculative_algorithm"] = "EAGLE3" if kind == "eagle3" else "EAGLE"
    if kind == "eagle-map":
        arguments["speculative_token_map"] = str(half)
    return start(**arguments)


@pytest.fixture
def without(start: Start) -> Any:
    return start()


@every_kind
def test_answers_and_lists_are_those_without_speculation(without: Any, speculating: Any) -> None:
    words = [*greedy([*NAMES, "lone"]), {"regex": "[0-9]{3}", "temperature": 0}]
    check_same(speculating, without, uneven(len(words)), words)


@every_kind
def test_sampled_answers_stay_in_their_sets(speculating: Any, named_sets: dict[str, NamedSet]) -> None:
    answers = check_sampled(speculating, named_sets, NAMES * 6)
    assert {answer.tokens[-1] for answer in answers} == {EOS}
    # Without masks, none of these random drafts is accepted.
    told = sum(one.said.get("spec_verify_ct", 0) for one in answers), sum(len(one.tokens) - 1 for one in answers)
    assert told[0] < 0.8 * told[1], told


@every_kind
@pytest.mark.parametrize("temperature", [0, 1])
def test_every_draft_that_a_head_knows_is_found(
    speculating: Any, lone: NamedSet, kind: str, temperature: float
) -> None:
    """Where one token is legal, the mask leaves a head no other. One that it lacks ends what a step accepts."""
    params = named("lone", temperature=temperature)
    outputs = speculating.generate(input_ids=prompts(24), sampling_params=params)
    assert all(answer(output) in lone.items for output in outputs)
    assert len(set(map(answer, outputs))) > 5
    assert verified(outputs) == [verifications(output["output_ids"], KNOWN[kind]) for output in outputs]


def verified(outputs: Outputs) -> list[int]:
    """Steps that verified drafts, for each request."""
    return [output["meta_info"].get("spec_verify_ct", 0) for output in outputs]


def verifications(tokens: list[int], known: Container[int]) -> int:
    """How many it takes behind the first token if every known draft is accepted: each adds one of the target's."""
    done, steps = 1, 0
    while done < len(tokens):
        drafts = [token in known for token in tokens[done : done + STEPS]]
        done += [*drafts, False].index(False) + 1
        steps += 1
    return steps
