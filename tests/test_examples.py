"""The parts of the retrieval example: semantic IDs, their tokens, and a model that learns them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import itemset

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import cold_start
import retrieval_data
import retrieval_model


@pytest.fixture(scope="module")
def codes():
    random = np.random.default_rng(0)
    centres = random.normal(size=(70, 16))
    points = centres.repeat(5, 0) + random.normal(scale=1e-3, size=(350, 16))
    return retrieval_data.semantic_ids(np.concatenate([points, points[:5]]).astype(np.float32))


def test_semantic_ids_are_distinct_and_near_points_begin_alike(codes):
    assert codes.shape == (355, retrieval_data.LEVELS + 1)
    assert len(np.unique(codes, axis=0)) == 355
    assert all(len(np.unique(group[:, 0])) == 1 for group in codes[:350].reshape(70, 5, -1))
    np.testing.assert_array_equal(codes[350:, :-1], codes[:5, :-1])  # equal points share all but the last code
    assert np.all(codes[350:, -1] != codes[:5, -1])


def test_an_index_of_their_texts_gives_the_keys_back(codes):
    tokenizer = retrieval_model.make_tokenizer(codes)
    texts = [retrieval_model.text_of(code) for code in codes]
    films = itemset.build_text(texts, tokenizer, keys=np.arange(1_000, 1_355))
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert {len(tokens) for tokens in encoded} == {codes.shape[1]}
    assert films.lookup(encoded).tolist() == list(range(1_000, 1_355))


def test_a_model_learns_what_comes_next(codes, tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(retrieval_model, "STEPS", 60)
    monkeypatch.setattr(retrieval_model, "BATCH", 4)
    tokenizer = retrieval_model.make_tokenizer(codes)
    encoded = {
        key: tokenizer.encode(retrieval_model.text_of(code), add_special_tokens=False) for key, code in enumerate(codes)
    }
    watched = [[0, 1, 2] * 20]
    retrieval_model.train(watched, encoded, tokenizer, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    end = tokenizer.eos_token_id
    prompt = torch.tensor([retrieval_model.tokens_of([0, 1, 2, 0, 1], encoded, end)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    answer = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=end)
    assert answer[0, prompt.shape[1] :].tolist() == [*encoded[2], end]


def test_a_cold_start_holds_out_the_newest_films_altogether():
    titles = {key: f"Film {key} ({1980 + key})" for key in range(1, 20)} | {20: "Film 20", 21: "Seven (Se7en) (1999)"}
    years = cold_start.years(titles)
    assert (years[1], years[20], years[21]) == (1981, 0, 1999)
    histories = [[1, 19, 2, 21], [21, 3], [4, 5], [6, 7, 21]]
    fresh = cold_start.newest(years, histories)
    assert fresh == {19, 21}  # of 21 films: both of 1999
    assert cold_start.without(histories, fresh) == [[1, 2], [3], [4, 5], [6, 7]]
    assert cold_start.cases(histories, fresh) == [([1], 19), ([6, 7], 21)]
    assert cold_start.recalls([[19, 1], [1, *range(2, 10), 21], [5]], [19, 21, 4]) == (1 / 3, 2 / 3)
