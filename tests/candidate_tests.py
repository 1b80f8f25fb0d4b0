"""What holds of a trainer's rollouts in either engine: their log-probabilities are those of `itemset.training`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_words import EOS, PROMPT, Answer, Item, asked
from sets import NamedSet, tagged_items

import itemset
from itemset.training import legal_log_probs

SETS = ("prefixes", "ragged", "labels", "tagged")
Trainer = Callable[[itemset.ItemSet, Sequence[Item], float], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def trainer(tiny_model: Path) -> Trainer:
    return trainer_of(tiny_model)


def trainer_of(path: Path) -> Trainer:
    """A function of a set, answers after PROMPT and a temperature: log q and log p of each token, in float32."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def log_probs(item_set: itemset.ItemSet, answers: Sequence[Item], temperature: float) -> Any:
        lengths = [len(answer) for answer in answers]
        ids = torch.tensor([[*answer, *[0] * (max(lengths) - len(answer))] for answer in answers])
        with torch.inference_mode():
            logits = model(torch.cat((torch.tensor([PROMPT] * len(ids)), ids), 1)).logits
        logits = logits[:, len(PROMPT) - 1 : -1]
        options: dict[str, Any] = {"stop_tokens": EOS, "lengths": lengths, "temperature": temperature}
        log_q, log_mass = legal_log_probs(logits, ids, item_set, **options)
        assert log_mass is not None
        return log_q, log_q + log_mass

    return log_probs


def check(trainer: Trainer, items: Any, answers: Sequence[Answer], temperature: float = 1.0) -> None:
    """Items of the set, and each token's log-probabilities within 1e-3 of the trainer's."""
    assert all(answer.item in items and answer.tokens[-1] == EOS for answer in answers)
    tokens = [answer.tokens for answer in answers]
    log_q, log_p = trainer(itemset.build([list(item) for item in sorted(items)]), tokens, temperature)
    for i, answer in enumerate(answers):
        said = answer.said["item_logprobs"]
        for name, expected in (("log_q", log_q), ("log_p", log_p)):
            assert said[name] == pytest.approx(expected[i, : len(answer.tokens)].tolist(), abs=1e-3)
        assert "key" in answer.said["item"]


def check_samples(engine: Any, named_sets: dict[str, NamedSet], trainer: Trainer, temperature: float = 0.7) -> None:
    """In one batch, beside a request with a bent distribution and one that does not ask."""
    words = [asked(name, item_logprobs=True, temperature=temperature) for name in SETS for _ in range(2)]
    others = [asked("ragged", item_logprobs=True, temperature=temperature), asked("tagged", item_logprobs=True)]
    answers = engine.ask([PROMPT] * 11, [*words, *others, asked("ragged", logprobs=1)])
    for i, name in enumerate(SETS):
        check(trainer, named_sets[name].items, answers[2 * i : 2 * i + 2], temperature)
    check(trainer, named_sets["ragged"].items, answers[8:9], temperature)
    check(trainer, named_sets["tagged"].items, answers[9:10])
    assert "item_logprobs" not in answers[10].said


def check_candidates(engine: Any, named_sets: dict[str, NamedSet], trainer: Trainer) -> None:
    """Each an output of its own: those of a list are the list's items, and draws those of the same seed."""
    options: dict[str, Any] = {"item_logprobs": True, "max_tokens": 20}
    for name in ("ragged", "tagged"):
        answers = engine.ask([PROMPT, PROMPT], {"item_set": name, "list": True, "n": 4, "width": 4, **options})
        (found,) = engine.rank(4, prompts=[PROMPT], item_set=name, width=4)
        assert len(answers) == 8
        for one in (answers[:4], answers[4:]):
            check(trainer, named_sets[name].items, one)
            assert [answer.said["item"]["rank"] for answer in one] == [1, 2, 3, 4]
            scores = [answer.said["item"]["score"] for answer in one]
            assert scores == pytest.approx([sum(answer.said["item_logprobs"]["log_p"]) for answer in one], abs=2e-3)
            assert [answer.tokens for answer in one] == [tokens for _, tokens in found.items]
    drawn = engine.ask([PROMPT], {"item_set": "tagged", "draws": True, "n": 5, "seed": 7, **options})
    assert [answer.item for answer in drawn] == [item for item, _ in engine.draw(item_set="tagged", draws=5, seed=7)]
    check(trainer, named_sets["tagged"].items, drawn)
    logprobs = [answer.said["item"]["logprob"] for answer in drawn]
    assert logprobs == pytest.approx([sum(answer.said["item_logprobs"]["log_p"]) for answer in drawn], abs=2e-3)
    legal = {"item_set": "ragged", "list": True, "n": 2, "renormalised": True, **options}
    for answer in engine.ask([PROMPT], legal):
        assert answer.said["item"]["score"] == pytest.approx(sum(answer.said["item_logprobs"]["log_q"]), abs=2e-3)
    part = {"item_set": "tagged", "exclude_keys": ["item 1"], "list": True, "n": 3, "item_logprobs": True}
    check(trainer, {tuple(x) for i, x in enumerate(tagged_items()) if i != 1}, engine.ask([PROMPT], part))


def check_logprobs(
    engine: Any, named_sets: dict[str, NamedSet], trainer: Trainer, logprobs: Callable[[Answer], list[float]],
    *, legal: bool, temperature: float,
) -> None:  # fmt: skip
    """That what the engine itself calls log-probabilities are log q if `legal`, else log p, at a temperature, of
    answers sampled at 0.7."""
    items = named_sets["ragged"].items
    words = asked("ragged", logprobs=0, temperature=0.7)
    for answer in engine.ask([PROMPT] * 3, [words] * 3):
        numbers = trainer(itemset.build([list(item) for item in sorted(items)]), [answer.tokens], temperature)
        assert logprobs(answer) == pytest.approx(numbers[not legal][0].tolist(), abs=1e-3)


REFUSED = [
    ({"list": True, "draws": True}, "draws and a ranked list exclude each other"),
    ({"list": "yes"}, "list must be true or false, not 'yes': n says how many items"),
    ({"list": True, "logit_bias": {5: 1.0}}, "logit_bias would bend the model's distribution, and ranked lists follow"),
    ({"item_logprobs": 1}, "item_logprobs must be true or false, not 1"),
    ({"item_logprobs": True, "return_set_weight": True}, "return_set_weight is the sum of log p - log q"),
    ({"item_logprobs": True, "logprobs": 1}, "item_logprobs cannot be had here: it comes in the place of log"),
]


def check_refusals(engine: Any) -> None:
    for words, message in REFUSED:
        with pytest.raises(engine.refusal, match=message):
            engine.ask([PROMPT], [asked("tagged", **{"n": 2, **words})])
