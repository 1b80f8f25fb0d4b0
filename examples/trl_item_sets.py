"""TRL's GRPO inside an item set: rollouts that are items, and the log-probabilities with which they were drawn.

class Trainer(LegalLogProbs, GRPOTrainer): ...

Trainer(item_set=films, rollout_func=item_rollout(films), model=..., reward_funcs=..., args=..., ...)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from itemset.adapters.huggingface import ItemSetLogitsProcessor
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.training import LegalPolicy, legal_tokens


class LegalLogProbs:
    """A mixin before `GRPOTrainer`: log q in place of log p, and `mass_weight` times log m in the loss.

    For text models whose completions are an item and the tokenizer's end token. With vLLM, TRL asks for
    `processed_logprobs`: under a constraint these are log q, so the importance ratio is one of like with like.
    """

    def __init__(self, *args: Any, item_set: ItemSet, mass_weight: float = 0.1, **options: Any) -> None:
        self.item_set, self.mass_weight = item_set, mass_weight
        self._log_mass: Tensor | None = None
        super().__init__(*args, **options)

    def _get_per_token_logps_and_entropies(
        self: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[Tensor, Tensor, None]:
        """Compute log q, where TRL computes log p by a fused head. All rows go at once, without all tokens' logits."""
        head = self.accelerator.unwrap_model(model).get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise ItemSetError("the model's head has a bias: take its logits, and legal_log_probs")
        ids, own = input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:].sum(1)
        with self.accelerator.autocast():
            outputs = model(
                input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, logits_to_keep=1
            )
        hidden = outputs.hidden_states[-1][:, -logits_to_keep - 1 : -1]
        legal = legal_tokens(ids, self.item_set, stop_tokens=self.processing_class.eos_token_id, lengths=own)
        mass = self.mass_weight != 0 and torch.is_grad_enabled()
        policy = LegalPolicy.of_hidden(hidden, head.weight, legal, temperature=self.temperature, mass=mass)
        self._log_mass = policy.log_mass if mass else None
        return policy.log_probs, policy.entropy, None

    def _compute_loss(self: Any, model: Any, inputs: Any) -> Tensor:
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        if self._log_mass is None:
            return loss
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        return loss - self.mass_weight * self._log_mass.sum(1).mean() / steps


def item_rollout(item_set: ItemSet) -> Callable[[list[str], Any], dict[str, list[Any]]]:
    """Return a `rollout_func` for TRL: draws of the trainer's own model inside the set, by `generate()`.

    They are draws at the trainer's temperature, so log q is what it returns as their log-probabilities.
    """

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
        given = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        width, stop = given.input_ids.shape[1], tokenizer.eos_token_id
        inside = ItemSetLogitsProcessor(item_set, prompt_length=width, stop_tokens=stop)
        found = model.generate(
            **given, do_sample=True, top_k=0, top_p=1.0, temperature=trainer.temperature, logits_processor=[inside],
            max_new_tokens=item_set.longest + 1, pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        tokens = found.sequences[:, width:]
        log_q = torch.stack(found.scores, 1).log_softmax(-1).gather(-1, tokens[..., None])[..., 0].tolist()
        rows = tokens.tolist()
        lengths = [row.index(stop) + 1 if stop in row else len(row) for row in rows]
        masks = given.attention_mask.bool()
        return {
            "prompt_ids": [row[mask].tolist() for row, mask in zip(given.input_ids, masks, strict=True)],
            "completion_ids": [row[:length] for row, length in zip(rows, lengths, strict=True)],
            "logprobs": [row[:length] for row, length in zip(log_q, lengths, strict=True)],
        }

    return rollout
