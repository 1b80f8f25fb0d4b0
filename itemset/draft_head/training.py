"""Training of a draft head together with its model (NEZHA, section 3.4).

A training instance is a history of items, L placeholders, and the item that followed. A window of a history holds one
instance for each of its items but the first: the placeholders of each stand after all items, see only the items before
their own and each other, and have the positions that they will have when a list is asked for. So 21 items of four
tokens, each with its end token, cost 185 tokens, not 20 prompts.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from itemset.draft_head.head import DraftHead
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.text import identify

Items = Sequence[Sequence[int]]


class Schedule(NamedTuple):
    """How long a head is trained, and with what."""

    window: int = 21  # items of a history that a row holds, the last one's own among them
    steps: int = 1_450
    batch: int = 48  # rows of a step
    seed: int = 0  # of the head's weights, and of what is chosen for the rows
    rate: float = 3e-3  # the model's highest learning rate


def train_head(
    model: Any, tokenizer: Any, item_set: ItemSet, histories: Sequence[Items], schedule: Schedule, *,
    kind: type[DraftHead] = DraftHead, log: Callable[[str], object] = print,
) -> DraftHead:  # fmt: skip
    """Teach a model of transformers and a new head what follows, and return the head. The tokenizer gets a token for
    each placeholder, `<sp_1>` and so on, and the model their embeddings.

    model: best one that has not learnt the histories yet: where both learn from the first step, the head finds as much
        as the model's own beams (docs/papers.md).
    histories: tokens of items in the order in which they followed each other; those shorter than a window are left out.
        A prompt is a history, with the tokenizer's end token after each item.
    Raises ItemSetError for what cannot be learnt, before the model or the tokenizer is changed.
    """
    levels, end, window = item_set.longest, tokenizer.eos_token_id, schedule.window
    names, size = [f"<sp_{level + 1}>" for level in range(levels)], model.get_input_embeddings().num_embeddings
    long_enough = _checked(tokenizer, item_set, histories, schedule, names, size)
    torch.manual_seed(schedule.seed)
    chance = random.Random(schedule.seed)
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    model.resize_token_embeddings(max(len(tokenizer), size))  # a model may have more rows than its tokenizer has tokens
    embeddings = model.get_input_embeddings().weight.detach()
    shape = {"hidden_size": model.config.hidden_size, "vocab_size": len(embeddings)}
    codes, placeholders = list(torch.tensor(item_set.items()).T), tokenizer.convert_tokens_to_ids(names)
    # Its embeddings begin at random: the model's are so small beside its states that the head would see them late.
    head = kind(codes, placeholders, **shape, tokenizer=identify(tokenizer))
    with torch.no_grad():  # its logits begin as the model's own: half of them from each of the two states that it adds
        for level, row in enumerate(head.codes):
            head.logits[level].weight.copy_(embeddings[row] / 2)
    head.to(model.device)
    rows, most_rates = Rows(levels, levels + 1, window), [schedule.rate, 1e-2]
    parameters = [{"params": one.parameters(), "lr": rate} for one, rate in zip((model, head), most_rates, strict=True)]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.1)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, most_rates, total_steps=schedule.steps, pct_start=0.1)
    for step in range(schedule.steps):
        windows = []
        for items in chance.choices(long_enough, weights=list(map(len, long_enough)), k=schedule.batch):
            first = chance.randrange(len(items) - window + 1)
            windows.append([token for item in items[first : first + window] for token in (*item, end)])
        tokens = torch.tensor(windows, device=model.device)
        states, followed, logits = rows.run(model, head, tokens)
        drafts = head.loss(states, followed)
        following = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        (drafts + levels * following).backward()
        optimizer.step()
        rate.step()
        if step % 100 == 99:
            losses = f"loss of the head {drafts.item() / levels:.2f} a token, of the model {following.item():.2f}"
            log(f"  step {step + 1} of {schedule.steps}: {losses}")
    return head


def _checked(
    tokenizer: Any, item_set: ItemSet, histories: Sequence[Items], schedule: Schedule, names: list[str], size: int
) -> list[Items]:
    """Return the histories that are long enough. Raises ItemSetError if none is, or for other bad input.

    names: of the placeholders. size: rows of the model's embeddings.
    """
    window, levels, ids, tokens = schedule.window, item_set.longest, item_set.token_ids, len(tokenizer)
    if window < 2 or min(schedule.steps, schedule.batch) < 1:
        raise ItemSetError(f"{schedule}: make the window at least 2, an item and what follows, others at least 1")
    if item_set.shortest != levels:
        raise ItemSetError(
            f"the set has items of {item_set.shortest} to {levels} tokens: give one whose items have as many, such as "
            "semantic IDs"
        )
    if tokenizer.eos_token_id is None:
        raise ItemSetError("the tokenizer has no end token, which stands between items: set its eos_token")
    if not (long_enough := [items for items in histories if len(items) >= window]):
        most = max(map(len, histories), default=0)
        raise ItemSetError(f"no history has {window} items, the longest has {most}: give a smaller window or more")
    item_set.lookup([item for items in long_enough for item in items])
    placeholders = len(set(names) - tokenizer.get_vocab().keys())  # that are new
    if len(bad := ids[(ids >= tokens) & ((ids < tokens + placeholders) | (ids >= size))]):
        raise ItemSetError(
            f"the set has the token id {bad[0]}, the tokenizer {tokens} tokens and the model {size}: build the set "
            f"with tokens of both, of which the {placeholders} after the tokenizer's last one will be placeholders"
        )
    return long_enough


class Rows:
    """Rows of items with the placeholders of all their instances after them."""

    def __init__(self, levels: int, each: int, window: int) -> None:
        """levels: placeholders of an instance. each: tokens of an item, with its end token. window: items of a row."""
        self._levels, self._each, self._length = levels, each, (length := window * each)
        self._begins = begins = torch.arange(1, window) * each  # [instances]: where each one's item begins
        self._positions = torch.cat((torch.arange(length), (begins[:, None] + torch.arange(levels)).flatten()))
        owner = torch.arange(len(begins)).repeat_interleave(levels)
        sees = torch.ones(len(self._positions), len(self._positions), dtype=torch.bool).tril()
        sees[length:, :length] = torch.arange(length) < begins[owner][:, None]
        sees[length:, length:] &= owner[:, None] == owner
        self._sees = sees[None, None]

    def run(self, model: Any, head: DraftHead, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all instances' states, [instances, levels + 1, d], the items that followed, [instances, levels], and
        the model's logits after each token but the last, [rows, tokens - 1, vocabulary]. windows: [rows, tokens]."""
        count, last, device = len(windows), self._begins - 1, windows.device
        placeholders = torch.tensor(head.placeholders, device=device).repeat(len(last)).expand(count, -1)
        hidden = model.base_model(
            input_ids=torch.cat((windows, placeholders), 1),
            position_ids=self._positions.to(device).expand(count, -1),
            attention_mask=self._sees.to(device).expand(count, -1, -1, -1),
            use_cache=False,
        ).last_hidden_state
        items = hidden[:, : self._length]
        at_placeholders = hidden[:, self._length :].unflatten(1, (len(last), self._levels))
        states = torch.cat((items[:, last, None], at_placeholders), 2).flatten(0, 1)
        followed = windows.unflatten(1, (-1, self._each))[:, 1:, : self._levels].flatten(0, 1)
        return states, followed, model.lm_head(items[:, :-1])
