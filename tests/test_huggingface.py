"""`generate()` of Hugging Face inside a set: what `prefix_allowed_tokens_fn` gives, and no item outside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import dict_trie
from strategies import item_sets
from transformers import AutoModelForCausalLM
from views import made

import itemset
from itemset.adapters import huggingface
from itemset.adapters.huggingface import ItemSetLogitsProcessor

EOS = 1
PROMPT = torch.tensor([[7, 8, 9], [10, 11, 12]])


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


def children_of(items: list[list[int]]) -> Callable[[int, torch.Tensor], list[int]]:
    """The function that users write today."""
    trie = dict_trie(items)

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        node = trie
        for token in tokens[PROMPT.shape[1] :].tolist():
            node = node.get(token, {})
        return [EOS if token is None else token for token in node] or [EOS]

    return allowed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "beams", "sampled", "wide"])
def test_the_same_as_a_function_of_prefixes(model, named_sets, kind):
    ways = {
        "greedy": {},
        "beams": {"num_beams": 5, "num_return_sequences": 5},
        "sampled": {"do_sample": True, "num_return_sequences": 4},
        "wide": {"num_beams": 12, "num_return_sequences": 12},  # more than some of the sets have
    }
    for name in ("fixed", "ragged", "prefixes", "labels"):
        items = [list(item) for item in named_sets[name].items]
        processor = ItemSetLogitsProcessor(
            itemset.load(named_sets[name].path), prompt_length=PROMPT.shape[1], stop_tokens=EOS
        )
        answers = []
        for constraint in ({"logits_processor": [processor]}, {"prefix_allowed_tokens_fn": children_of(items)}):
            torch.manual_seed(3)
            answers.append(model.generate(PROMPT, max_new_tokens=14, pad_token_id=2, **ways[kind], **constraint))
        assert answers[0].tolist() == answers[1].tolist(), name
        if kind != "wide":
            for row in answers[0][:, PROMPT.shape[1] :].tolist():
                assert tuple(token for token in row if token not in (EOS, 2)) in named_sets[name].items


@pytest.mark.parametrize("few", [0, 10**9], ids=["children alone", "whole rows"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=item_sets(), data=st.data())
def test_what_is_allowed_is_what_the_oracle_allows(monkeypatch, few, items, data):
    monkeypatch.setattr(huggingface, "FEW", few)
    vocabulary = max(map(max, items)) + 5
    stop = vocabulary - 1
    item = data.draw(st.sampled_from(items))
    node, prefix = dict_trie(items), item[: data.draw(st.integers(0, len(item)))]
    for token in prefix:
        node = node[token]
    processor = ItemSetLogitsProcessor(made(items), prompt_length=2, stop_tokens=[stop])
    logits = torch.randn(1, vocabulary)
    scores, kept = processor(torch.tensor([[0, 0, *prefix]]), logits.clone()), torch.full((1, vocabulary), -torch.inf)
    legal = [stop if token is None else token for token in node]
    kept[0, legal] = logits[0, legal]
    assert torch.equal(scores, kept)


def test_no_stop_token_is_refused(named_sets):
    with pytest.raises(ValueError, match="an item could never end: give"):
        ItemSetLogitsProcessor(itemset.build([[1]]), prompt_length=0, stop_tokens=[])


def test_items_may_begin_in_different_columns() -> None:
    films = itemset.build([[3, 4], [5, 6]])
    processor = ItemSetLogitsProcessor(films, prompt_length=[1, 3], stop_tokens=EOS)
    tokens = torch.tensor([[9, 3, 4], [9, 5, 6], [9, 9, 9], [9, 9, 9]])  # two beams each
    allowed = processor(tokens, torch.zeros(4, 10)).isfinite()
    assert [row.nonzero().view(-1).tolist() for row in allowed] == [[EOS], [EOS], [3, 5], [3, 5]]


def test_numbers_of_any_kind_are_taken_and_padding_is_no_item() -> None:
    films = itemset.build([[3, 4], [5, 6]])
    rows = torch.tensor([[9, 3, 4, EOS, -100], [9, 5, -100, -100, -100], [9, -100, -100, -100, -100]])
    for begin, stop in ((1, EOS), (np.int64(1), np.int64(EOS)), (torch.tensor(1), torch.tensor([EOS]))):
        processor = ItemSetLogitsProcessor(films, prompt_length=begin, stop_tokens=stop)
        allowed = processor(rows[:1, :3], torch.zeros(1, 10)).isfinite()
        assert allowed.nonzero().tolist() == [[0, EOS]]
        assert processor.items(rows) == [[[3, 4]], [], []]


SMALL = [[[10, 11], [10, 12, 13]], [[5]], [[20, 21], [20], [22], [30, 31, 32]]]


@pytest.mark.slow
@pytest.mark.parametrize("items", SMALL)
@pytest.mark.parametrize("beams", [1, 5, 12])
def test_fewer_items_than_beams_are_all_listed_once(model, items, beams):
    films = itemset.build(items, vocab_size=2112)
    processor = ItemSetLogitsProcessor(films, prompt_length=3, stop_tokens=EOS)
    ways = {"num_beams": beams, "num_return_sequences": beams, "length_penalty": 0.0, "do_sample": False}
    limits = {"max_new_tokens": films.longest + 1, "pad_token_id": 2}
    rows = model.generate(PROMPT, logits_processor=[processor], **limits, **ways)
    for found in processor.items(rows, each=beams):
        assert len(found) == len(set(map(tuple, found))) == min(beams, len(items))
        assert all(one in items for one in found)
        assert len(films.lookup(found)) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"stop_tokens": 11}, {}, "the stop token 11 occurs inside an item"),
        ({"stop_tokens": None}, {}, "could never end: give the model's end-of-sequence token"),
        ({"stop_tokens": []}, {}, "could never end"),
        ({"stop_tokens": [EOS, 5_000]}, {}, "hold token id 5000, the model's logits end at 2111"),
        ({"prompt_length": 4}, {}, "prompt_length=4 does not go with 2 rows of 3 tokens"),
        ({"prompt_length": [3, 3, 3]}, {}, "does not go with 2 rows"),
        ({"prompt_length": -1}, {}, "prompt_length=-1 does not go with"),
        ({"prompt_length": 2}, {}, "prompt_length is not where items begin"),
        ({}, {"bad_words_ids": [[10]]}, "such as bad_words_ids, forbids what the set allows"),
        ({}, {"bad_words_ids": [[11], [12]]}, "such as bad_words_ids, forbids"),
        ({}, {"bad_words_ids": [[10]], "num_beams": 3}, "such as bad_words_ids, forbids"),
    ],
)
def test_what_can_be_no_item_is_an_error(model, given, options, message):
    films = itemset.build(SMALL[0], vocab_size=2112)

    def generate() -> None:
        processor = ItemSetLogitsProcessor(films, **{"prompt_length": 3, "stop_tokens": EOS} | given)
        model.generate(PROMPT, logits_processor=[processor], max_new_tokens=4, pad_token_id=2, **options)

    with pytest.raises(itemset.ItemSetError, match=message):
        generate()
