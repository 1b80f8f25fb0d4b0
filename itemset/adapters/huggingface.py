"""Hugging Face's `generate()` inside an item set, in place of `prefix_allowed_tokens_fn`; the pass of draft heads."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from itemset.draft_head.head import DraftHead
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.masking.arena import Arena, room_for
from itemset.masking.batch import LOCAL, Batch
from itemset.masking.slots import Slots
from itemset.trie.walk import END

FEW = 32  # where the vocabulary is at least this many times larger than a row's children, only their logits are read


class ItemSetLogitsProcessor(LogitsProcessor):
    """Lets `generate()` answer with items of a set alone, greedily, by sampling and with beams:

        processor = ItemSetLogitsProcessor(films, prompt_length=ids.shape[1], stop_tokens=tokenizer.eos_token_id)
        model.generate(ids, logits_processor=[processor], num_beams=10, num_return_sequences=10, max_new_tokens=40)

    The answers are those of a `prefix_allowed_tokens_fn` that returns the children of what has been generated, and the
    stop tokens if an item may end there. If the set has fewer items than beams, surplus beams score -inf, and
    `generate()` returns them all the same: `items` omits them. No state is kept between steps: beams may change places.

    On a CPU the walk is compiled; on an accelerator it is a kernel, and after the first step nothing is waited for.
    """

    supports_continuous_batching = False

    def __init__(
        self, item_set: ItemSet, *, prompt_length: int | Sequence[int] | Tensor,
        stop_tokens: int | Sequence[int] | Tensor | None,
    ) -> None:  # fmt: skip
        """prompt_length: columns of `input_ids` before the item, with padding; for an encoder-decoder model 1, its
        start token. One for all prompts, or one for each if the items begin in different columns. stop_tokens: the
        model's end tokens. Raises ItemSetError if there is none, or if one occurs inside an item."""
        self._item_set, self._given = item_set, prompt_length
        given = prompt_length, () if stop_tokens is None else stop_tokens
        self._begins, self._stops = (torch.as_tensor(one).reshape(-1).tolist() for one in given)
        if not self._stops:
            raise ItemSetError("an item could never end: give the model's end-of-sequence token as stop_tokens")
        if inside := item_set.occurring(self._stops):
            raise ItemSetError(f"the stop token {inside[0]} occurs inside an item, which could never be finished")
        self._highest, self._length = max(int(item_set.token_ids[-1]), *self._stops), -1
        self._slots: Slots | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores, [rows, vocabulary], with -inf for each token that may not follow.

        input_ids: [rows, tokens so far]. Raises ItemSetError if that can be no item, or none is left of a prompt.
        """
        # Triton is for accelerators that it knows: on others the walk is the CPU's.
        device = scores.device if importlib.util.find_spec("triton") else torch.device("cpu")
        rows, length = input_ids.shape
        slots = self._with_room(rows, device)
        numbers, sets, marks = (one[:rows] for one in self._begun)
        slots.assign(numbers, sets, marks)
        self._check(rows, length, scores.shape[1])
        begin = self._columns.repeat_interleave(rows // len(self._begins))  # each prompt's beams stand together
        end = torch.full_like(numbers, length)
        batch = Batch(numbers, input_ids.to(device), begin, end, by_slot=False)
        masked, left = self._masked(slots, batch, scores.to(device), self._width(length))
        first, self._length = length != self._length + 1, length
        if first or device.type == "cpu":
            over = slots.row_states[:rows] & LOCAL == END  # a whole item; at first also what is no beginning of one
            wrong = first and any(
                self._item_set.find(input_ids[i, begin[i] :].tolist()) is None for i in over.nonzero().view(-1).tolist()
            )
            if wrong or bool(left.isneginf().all(1).any()):
                raise ItemSetError(
                    "no token is left that may follow: prompt_length is not where items begin, or another parameter "
                    "of generate(), such as bad_words_ids, forbids what the set allows"
                )
        return masked.to(scores.device)

    def items(self, rows: Tensor, *, each: int = 1) -> list[list[list[int]]]:
        """Return each prompt's distinct items in what `generate()` has returned. each: its `num_return_sequences`."""
        found: list[list[list[int]]] = []
        for first in range(0, len(rows), each):
            begin = self._begins[first * len(self._begins) // len(rows)]
            after = [row[begin:].tolist() for row in rows[first : first + each]]
            ends = [next((i for i, token in enumerate(row) if token in self._stops), len(row)) for row in after]
            distinct = dict.fromkeys(tuple(row[:end]) for row, end in zip(after, ends, strict=True))
            found.append([list(one) for one in distinct if one and self._item_set.find(one) is not None])
        return found

    def _check(self, rows: int, length: int, vocabulary: int) -> None:
        if self._highest >= vocabulary:
            raise ItemSetError(
                f"the set, or its stop tokens, hold token id {self._highest}, the model's logits end at "
                f"{vocabulary - 1}: build the set with this model's tokenizer"
            )
        begins = self._begins
        if rows % len(begins) or not 0 <= min(begins) <= max(begins) <= length:
            raise ItemSetError(
                f"prompt_length={self._given} does not go with {rows} rows of {length} tokens: give the columns of "
                "input_ids, one number for all prompts or one for each"
            )

    def _width(self, length: int) -> int:
        """Return the most tokens that may follow in a row."""
        plan = self._item_set.level_plan
        return len(self._stops) + max(1, *(plan.children(length - begin, 1) for begin in self._begins))

    @staticmethod
    def _masked(slots: Slots, batch: Batch, scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return masked scores in new memory, and some of each row's with all that may follow among them."""
        if width * FEW > scores.shape[1]:
            masked = scores.clone(memory_format=torch.contiguous_format)
            slots.step(batch, masked)
            return masked, masked
        tokens, left = slots.children(batch, scores.contiguous(), width)
        masked = torch.full_like(scores, -torch.inf, memory_format=torch.contiguous_format)
        none = tokens < 0  # there the row's first child again, which leaves it as it is
        columns = torch.where(none, tokens[:, :1], tokens).clamp(min=0).long()
        return masked.scatter_(1, columns, torch.where(none, left[:, :1], left)), left

    def _with_room(self, rows: int, device: torch.device) -> Slots:
        if self._slots is None or len(self._slots.row_states) < rows:
            arena = Arena(room_for(self._item_set), device)
            self._slots = Slots(arena, rows, max_rows=rows, max_stop_tokens=len(self._stops))
            numbers, self._columns = torch.arange(rows, device=device), torch.tensor(self._begins, device=device)
            marks = torch.tensor([-1, *self._stops], dtype=torch.int32, device=device).expand(rows, -1)
            self._begun = numbers, torch.full_like(numbers, arena.acquire(self._item_set)), marks
        return self._slots


@torch.no_grad()
def draft_states(model: Any, head: DraftHead, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Run a decoder-only model once over prompts and the head's placeholders after them, for `draft_search`.

    input_ids: [batch, tokens], prompts that end in the last column. attention_mask: the same shape, 0 at the padding
    before shorter prompts; None if there is none.
    Returns the last layer's hidden states at the last token and the placeholders: [batch, L + 1, d].
    Raises ItemSetError if the head is not one for this model.
    """
    head.check(hidden_size=model.config.hidden_size, vocab_size=model.get_input_embeddings().num_embeddings)
    after = torch.tensor(head.placeholders, device=input_ids.device).expand(len(input_ids), -1)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = torch.cat((mask, torch.ones_like(after)), 1)
    hidden: Tensor = model.base_model(
        input_ids=torch.cat((input_ids, after), 1),
        attention_mask=mask,
        position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
    return hidden[:, -1 - head.levels :]
