"""TRL's real GRPO loop inside an item set, with a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import itemset

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from trl_item_sets import LegalLogProbs, item_rollout

VOCABULARY, STEPS = 200, 3


class Trainer(LegalLogProbs, GRPOTrainer):
    """Keeps how far the trainer's log-probabilities are from the rollouts'."""

    gaps: list[float]

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        with torch.no_grad():
            ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
            mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
            mine, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])
        gap = (mine - inputs["sampling_per_token_logps"]) * inputs["completion_mask"]
        self.gaps.append(float(gap.abs().max()))
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("mass_weight", [0.0, 0.1])
def test_rollouts_are_items_and_the_trainer_has_their_log_probabilities(
    tiny_model: Path, tmp_path: Path, mass_weight: float
) -> None:
    words = {"<end>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<unk>": 0, **words}, unk_token="<unk>")),
        unk_token="<unk>", eos_token="<end>", pad_token="<pad>",
    )  # fmt: skip
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    random = np.random.default_rng(0)
    items = [random.integers(100, VOCABULARY, random.integers(1, 5)).tolist() for _ in range(60)]
    films, rewarded = itemset.build(items), []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        for ids in completion_ids:
            assert ids[-1] == 1
            films.lookup([ids[:-1]])  # raises if it is none
        rewarded.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_steps=STEPS, beta=0.0,
        learning_rate=1e-3, temperature=0.8, max_completion_length=films.longest + 1, save_strategy="no",
        report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    prompts = {"prompt": ["w3 w4 w5", "w6", "w7 w8", "w9 w9 w9 w9"] * 4}  # of different lengths
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    before = model.get_input_embeddings().weight.detach().clone()
    trainer = Trainer(
        model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_dict(prompts),
        processing_class=tokenizer, item_set=films, mass_weight=mass_weight, rollout_func=item_rollout(films),
    )  # fmt: skip
    trainer.gaps = []
    trainer.train()
    assert len(rewarded) == 8 * STEPS
    assert len(trainer.gaps) == STEPS
    assert max(trainer.gaps) <= 1e-3
    assert not torch.equal(before, model.get_input_embeddings().weight)
