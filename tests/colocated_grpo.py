"""TRL's real GRPO loop with vLLM in its process (`vllm_mode="colocate"`), rollouts inside a set by VLLM_STATIC alone.

python colocated_grpo.py MODEL FOLDER: prints JSON: of each step, the least and the largest importance ratio.

Two things stand in for what a CPU has not: vLLM runs eagerly in float32, and new weights go in by its own
`reload_weights`. TRL calls the model's `load_weights`, which vLLM's layers for CPUs do not have once they are packed.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import itemset

STEPS = 3


def main(model: str, folder: Path) -> list[tuple[float, float]]:
    random = np.random.default_rng(0)
    films = itemset.build([random.integers(100, 1000, random.integers(1, 5)).tolist() for _ in range(60)])
    films.save(folder / "films.itemset")
    options = {"item_sets": {"films": str(folder / "films.itemset")}, "item_set_kernels": "numba"}
    os.environ["VLLM_STATIC"] = json.dumps(options)

    from datasets import Dataset
    from engines import FAST
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
    from trl_item_sets import LegalLogProbs

    def sync(self: Any) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(self._iter_named_params())})
        self.llm.reset_prefix_cache()

    fast = {name: FAST[name] for name in ("dtype", "enforce_eager", "block_size", "kv_cache_memory_bytes")}
    vllm_generation.LLM = partial(vllm_generation.LLM, **fast)
    vllm_generation.VLLMGeneration.sync_weights = sync
    ratios = []

    class Trainer(LegalLogProbs, GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = super()._generate_and_score_completions(inputs)
            of_tokens = out["importance_sampling_ratio"][out["completion_mask"].bool()]
            ratios.append((float(of_tokens.min()), float(of_tokens.max())))
            return out

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        films.lookup([ids[:-1] for ids in completion_ids])  # raises if one is no item
        return [float(len(ids)) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=8, num_generations=4, max_steps=STEPS, beta=0.0,
        learning_rate=1e-3, temperature=0.8, max_completion_length=films.longest + 1, save_strategy="no",
        report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False, use_vllm=True,
        vllm_mode="colocate", vllm_max_model_length=FAST["max_model_len"],
        vllm_importance_sampling_mode="token_truncate", generation_kwargs={"extra_args": {"item_set": "films"}},
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), reward_funcs=reward, args=config,
        train_dataset=Dataset.from_dict({"prompt": ["A film", "The next one is"] * 4}), item_set=films,
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.train()
    return ratios


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
