"""The draft-head example's training: the retrieval example's model and a head learn together (NEZHA, section 3.4).

A training instance is a history, four placeholders, and the film watched next. Twenty of a user's instances share one
row: the placeholders of each stand after the row's films, see only the films before their own and each other, and have
the positions that they will have when a list is asked for. So a row of 21 films costs 185 tokens, not 20 prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from films_data import emptied
from numpy.typing import NDArray
from retrieval_model import MEMORY, tokens_of
from torch import Tensor

from itemset.ranking.draft_head import DraftHead
from itemset.text import identify

STEPS, BATCH = 600, 24
HEAD_FILE = "draft_head.safetensors"


def train(
    histories: Sequence[Sequence[int]],
    encoded: dict[int, list[int]],
    codes: NDArray[Any],
    begin: Path,
    folder: Path,
    *,
    kind: type[DraftHead] = DraftHead,
    seed: int = 0,
    steps: int = STEPS,
) -> None:
    """Teach a model and a head what comes next, and save both, with the tokenizer, into a folder.

    encoded: each film's tokens by its key. codes: the same tokens, [films, L]. begin: the folder of a trained model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    chance = random.Random(seed)
    tokenizer, model = AutoTokenizer.from_pretrained(begin), AutoModelForCausalLM.from_pretrained(begin)
    levels = codes.shape[1]
    names = [f"<sp_{level + 1}>" for level in range(levels)]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    model.resize_token_embeddings(len(tokenizer))
    head = new_head(kind, model, tokenizer, codes, tokenizer.convert_tokens_to_ids(names))
    rows = Rows(levels, levels + 1)  # an end token after each film
    parameters = [{"params": model.parameters(), "lr": 1e-3}, {"params": head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.1)
    most = [group["lr"] for group in parameters]
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, most, total_steps=steps, pct_start=0.1)
    long_enough = [watched for watched in histories if len(watched) > MEMORY]
    for step in range(steps):
        windows = []
        for watched in chance.choices(long_enough, weights=list(map(len, long_enough)), k=BATCH):
            first = chance.randrange(len(watched) - MEMORY)
            windows.append(tokens_of(watched[first : first + MEMORY + 1], encoded, tokenizer.eos_token_id))
        drafts, following = rows.losses(model, head, torch.tensor(windows))
        optimizer.zero_grad()
        (drafts + levels * following).backward()
        optimizer.step()
        rate.step()
        if step % 100 == 99:
            print(
                f"  step {step + 1} of {steps}: loss of the head {drafts.item() / levels:.2f} a token, "
                f"of the model {following.item():.2f}",
                flush=True,
            )
    unfinished = emptied(folder.with_suffix(".unfinished"))
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    head.save(unfinished / HEAD_FILE)
    unfinished.rename(folder)


def new_head(
    kind: type[DraftHead], model: Any, tokenizer: Any, codes: NDArray[Any], placeholders: Sequence[int]
) -> DraftHead:
    """A head whose logits begin as the model's own: half a logit from each of the two states that it adds.

    Its embeddings begin at random. The model's are so small beside its states that the head would see them late.
    """
    embeddings = model.get_input_embeddings().weight.detach()
    head = kind(
        list(codes.T),
        placeholders,
        hidden_size=model.config.hidden_size,
        vocab_size=len(embeddings),
        tokenizer=identify(tokenizer),
    )
    with torch.no_grad():
        for level, row in enumerate(head.codes):
            head.logits[level].weight.copy_(embeddings[row] / 2)
    return head


class Rows:
    """Rows of films with the placeholders of all their instances after them."""

    def __init__(self, levels: int, each: int, films: int = MEMORY + 1) -> None:
        """levels: placeholders of an instance. each: tokens of a film, with its end token. films: of a row."""
        self._levels, self._each = levels, each
        self._length = films * each
        # [instances]: where each one's film begins
        self._begins = begins = torch.arange(1, films) * each
        offsets = torch.arange(levels)
        self._positions = torch.cat((torch.arange(self._length), (begins[:, None] + offsets).flatten()))
        owner = torch.arange(len(begins)).repeat_interleave(levels)
        size = len(self._positions)
        sees = torch.zeros(size, size, dtype=torch.bool)
        sees[: self._length, : self._length] = torch.ones(self._length, self._length).tril().bool()
        sees[self._length :, : self._length] = torch.arange(self._length) < begins[owner][:, None]
        sees[self._length :, self._length :] = (owner[:, None] == owner) & torch.ones(
            len(owner), len(owner)
        ).tril().bool()
        self._sees = sees[None, None]

    def losses(self, model: Any, head: DraftHead, windows: Tensor) -> tuple[Tensor, Tensor]:
        """The head's loss on all instances, and the model's own on the films. windows: [rows, tokens] int64."""
        states, wanted, logits = self.run(model, head, windows)
        following = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        return head.loss(states, wanted), following

    def run(self, model: Any, head: DraftHead, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states of all instances, the films that followed, and the model's logits after each token but the last.

        Returns [instances, levels + 1, d], [instances, levels] and [rows, tokens - 1, vocabulary].
        """
        count, last = len(windows), self._begins - 1
        placeholders = torch.tensor(head.placeholders).repeat(len(self._begins)).expand(count, -1)
        hidden = model.base_model(
            input_ids=torch.cat((windows, placeholders), 1),
            position_ids=self._positions.expand(count, -1),
            attention_mask=self._sees.expand(count, -1, -1, -1),
            use_cache=False,
        ).last_hidden_state
        films = hidden[:, : self._length]
        at_placeholders = hidden[:, self._length :].unflatten(1, (len(last), self._levels))
        states = torch.cat((films[:, last, None], at_placeholders), 2).flatten(0, 1)
        wanted = windows.unflatten(1, (-1, self._each))[:, 1:, : self._levels].flatten(0, 1)
        return states, wanted, model.lm_head(films[:, :-1])
