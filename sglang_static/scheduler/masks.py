"""Item sets inside SGLang's sampler: the state of each request slot, and the mask of each logits row."""

import copy
from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from itemset.item_set import ItemSet
from itemset.masking.arena import Arena, Resident, check_tables
from itemset.masking.arena_plan import Holdings
from itemset.masking.batch import LOCAL, STATE, TREE, Batch
from itemset.masking.slots import MAX_STOP_TOKENS, NO_SET, Slots, as_table
from itemset.ranking.beams import warm_up
from itemset.serving.catalogue import Catalogue
from itemset.serving.config import StaticConfig
from itemset.serving.wire import SETS, EngineRequest, SetRef
from itemset.trie.walk import DEAD, END
from sglang_static import compat
from sglang_static.compat import hook, logger

PADDED = 64  # columns of which SGLang's logits are a multiple (layers/vocab_parallel_embedding.py)

_current: "list[ItemSetSampler]" = []


def current() -> "ItemSetSampler | None":
    """This process's sampler of item sets; None on the host path, and where tokens are not sampled."""
    if not _current:
        return None
    (sampler,) = _current
    if not hasattr(sampler, "slots") and (pool := getattr(sampler.runner, "req_to_token_pool", None)) is not None:
        drafts = compat.runtime.max_speculative_num_draft_tokens()
        sampler.allocate(pool.req_to_token.shape[0], drafts or 1)
    return sampler


class Admitted(NamedTuple):
    """What the sampler must know of a request. marks: as a row of `Slots.marks`."""

    item_set: ItemSet
    resident: Resident
    marks: Sequence[int]


class ItemSetSampler:
    """One of each scheduler process, beside its model runner. Runs on SGLang's forward stream.

    A request's slot is its row in `req_to_token`. A prefill, first or after retraction, begins its item anew and walks
    what it has sampled before; each decoding step walks its own input token, and verification what it accepts.
    """

    runner: Any = None  # SGLang's, if there is one
    list_rows: int  # rows of a pass of ranked lists for which there is memory; set by `list_hooks`, as is the next
    rows_a_step: int  # that those which share a step may have together

    def __init__(self, config: StaticConfig, device: torch.device | str, vocab_size: int) -> None:
        """Reserve the device's memory. Raises ItemSetError as `itemset.load` and `Arena` do."""
        self.catalogue, self.config, self.vocab_size = Catalogue(config), config, vocab_size
        self.sanitizes_nan = compat.environ.envs.SGLANG_SANITIZE_NAN_LOGITS.get()
        self.arena = Arena(self.catalogue.arena_bytes(), device, kernels=config.item_set_kernels)
        self.holdings = Holdings(self.arena.plan, self.catalogue.registered)
        for item_set in self.catalogue.registered.values():
            check_tables(item_set)
            self.arena.release(self.arena.acquire(item_set))  # it stays: its room is held
        _current[:] = [self]
        logger.info("Item sets on %s: %s bytes", self.arena.device, f"{self.arena.plan.nbytes:,}")

    def allocate(self, slots: int, drafts: int) -> None:
        """Make the states. slots: rows of `req_to_token`. drafts: logits rows of a request in verification, or 1."""
        self.slots = Slots(self.arena, slots, max_rows=slots * drafts, max_stop_tokens=MAX_STOP_TOKENS)
        self._constrained = [False] * slots
        self._prompt = torch.zeros(slots, dtype=torch.int64, device=self.arena.device)
        self._one = torch.ones(slots, dtype=torch.int64, device=self.arena.device)
        self._warm_up(drafts)

    def _warm_up(self, drafts: int) -> None:
        """Compile the kernels now, in each form that a step launches. All integers are of 64 bits, and SGLang's logits
        float32, with or without the padding of the vocabulary."""
        nobody, one = torch.full_like(self._one[:1], -1), self._one[:1]
        plain = Batch(nobody, nobody[:, None], one, one, by_slot=False)
        chain = plain._replace(tokens=nobody, rows_each=1)
        tree = chain._replace(above=nobody, layout=TREE)
        states = self.slots.walk(plain)
        for columns in {self.vocab_size, -(-self.vocab_size // PADDED) * PADDED}:
            logits = torch.zeros(1, columns, device=self.arena.device)[:, : self.vocab_size]
            self.slots.step(plain, logits)
            if drafts > 1:
                self.slots.step(chain, logits)
                self.slots.step(tree, logits)
                self.slots.mask(states, nobody, logits)
            else:  # with speculation, lists are made in rounds
                warm_up(self.arena, logits[:, None], stepwise=True)
        if drafts > 1:
            self.advance(states, nobody, nobody)
            self.slots.forced(states, nobody, nobody.new_zeros(1, drafts - 1), guess=True)

    def stage(self, batch: Any) -> None:
        """Before a forward pass: begin the items of prefilled requests, and note the sets and rows to be masked."""
        mode, info = batch.forward_mode, batch.sampling_info
        if info is not None:
            info.item_sets = None  # without the overlap scheduler, SGLang keeps the object from step to step
        if mode.is_extend_without_speculative():
            decoding = set(map(id, batch.decoding_reqs or ()))
            self._assign([request for request in batch.reqs if id(request) not in decoding])
        elif not mode.is_decode():
            return
        if info is not None and (numbers := self.numbers(batch)):
            rows = len(batch.reqs)  # after which a beam search may have more, whose logits are not masked
            slots, last = batch.req_pool_indices[:rows].long(), slice(rows)
            if not mode.is_decode():
                last = moved(torch.tensor(batch.extend_lens).cumsum(0) - 1, slots.device)
            # Tokens sampled so far, the last input token included: none before a prefill of a new request.
            so_far = (batch.seq_lens[:rows] - self._prompt[slots]).clamp(min=0)
            # Of each request's input, the history holds the last token alone.
            history = batch.input_ids.long()[last].view(rows, 1)
            info.item_sets = numbers, Batch(slots, history, 1 - so_far, self._one[:rows], by_slot=False)

    def numbers(self, batch: Any) -> list[int]:
        """Return the sets of the batch's requests that take the device path."""
        return [request.item_set.resident.number for request in batch.reqs if hasattr(request, "item_set")]

    def tree_mask(self, verify: Any, batch: Any, other: Any) -> Any:
        """Return the mask of the rows of draft chains or trees, [requests x drafts], for verification: as SGLang's
        GrammarMask (constrained/base_grammar_backend.py), after that of other grammars, if any.

        A row stands for the tokens on its path from the root, the request's last committed token. A draft that leaves
        the set leaves its row unmasked: its parent's row gives it no chance.
        """
        slots, drafts = batch.req_pool_indices.long(), verify.draft_token_num
        tokens, begin = verify.draft_token.long().reshape(-1, drafts), self._prompt[slots] - batch.seq_lens
        options: dict[str, Any] = {"by_slot": False, "tokens": tokens.reshape(-1), "rows_each": drafts}
        rows = Batch(slots, tokens, begin, self._one[: len(slots)], **options)
        if verify.tree_topk != 1:  # SGLang itself takes 1 for a chain; n-grams make trees of any form
            parents = parents_of(verify.retrieve_next_token, verify.retrieve_next_sibling)
            first_row = torch.arange(0, len(slots) * drafts, drafts, device=slots.device)[:, None]
            above = torch.where(parents >= 0, parents + first_row, -1).reshape(-1)
            rows = rows._replace(above=above, layout=TREE)
        numbers = self.numbers(batch)

        def apply(logits: Tensor) -> None:
            if other is not None:
                other.apply(logits)
            self.arena.use(numbers)
            self.slots.step(rows, logits)

        return SimpleNamespace(apply=apply)

    def force_drafts(self, batch: Any, drafts: Tensor, trees: Tensor) -> None:
        """Overwrite n-grams of requests with a set by a chain: what the set forces, and then guesses within it.

        drafts: [requests x nodes] int64, a request's last token first. trees: [requests x nodes x nodes], which nodes
        are above each. Both are on the host, which waits for the device here as SGLang did just before.
        """
        if not (numbers := self.numbers(batch)):
            return
        self.arena.use(numbers)
        slots, nodes = batch.req_pool_indices.long(), drafts.view(len(batch.reqs), -1)
        begin, last = self._prompt[slots] - batch.seq_lens, moved(nodes[:, :1], self.arena.device)
        states = self.slots.walk(Batch(slots, last, begin, self._one[: len(slots)], by_slot=False))
        chains = last.new_full((len(nodes), nodes.shape[1] - 1), -1)
        self.slots.forced(states, slots, chains, guess=True)
        chains = chains.cpu()
        ours = (chains >= 0).all(1)  # not before a thought has ended
        nodes[ours, 1:] = chains[ours]
        trees.view(*nodes.shape, -1)[ours] = torch.ones_like(trees.view(*nodes.shape, -1)[0]).tril()

    def accept(self, batch: Any, tokens: Tensor, lengths: Tensor, *, walked: int) -> None:
        """Walk what a step has sampled or verified. tokens: [requests, any]. lengths: [requests], how many of them.
        walked: tokens before these that are no part of `seq_lens` yet."""
        slots = batch.req_pool_indices.long()
        begin = self._prompt[slots] - batch.seq_lens - walked
        self.slots.walk(Batch(slots, tokens.long(), begin, lengths.long(), by_slot=False))

    def committed(self, slots: Tensor) -> Tensor:
        """Return the state of each of these slots, with its set: [n] int64. END where the tokens have left the set."""
        states = self.slots.cells[slots] & STATE
        return torch.where(states & LOCAL == DEAD, states - DEAD + END, states)

    def advance(self, states: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        """Return the states after one more token each; tensors of [n]."""
        marks, after = self.slots.marks[slots], torch.empty_like(states)
        return self.arena.kernels.advance(self.arena, states, tokens.long(), marks, after)

    def _assign(self, requests: list[Any]) -> None:
        rows: list[list[int]] = []
        outputs: list[list[int]] = []
        for request in requests:
            slot, admitted = request.kv.req_pool_idx, getattr(request, "item_set", None)
            if admitted is not None:
                place = admitted.resident
                self.arena.place(admitted.item_set, place.number, place.start, place.below)
                rows.append([slot, len(request.origin_input_ids), place.number, *admitted.marks])
                outputs.append(list(request.output_ids))
            elif self._constrained[slot]:
                rows.append([slot, 0, NO_SET])
                outputs.append([])
            self._constrained[slot] = admitted is not None
        if not rows:
            return
        # Each row of the moved table has a stride of 1.
        table = moved(as_table(rows, 4 + MAX_STOP_TOKENS).long().T.contiguous(), self.arena.device)
        slots, prompts, numbers = table[:3]
        self._prompt.index_copy_(0, slots, prompts)
        self.slots.assign(slots, numbers, table[3:].T)
        lengths = list(map(len, outputs))
        if (most := max(lengths)) > 0:
            self.arena.use([row[2] for row in rows])
            end, history = moved(lengths, slots.device), moved(as_table(outputs, most).long(), slots.device)
            self.slots.walk(Batch(slots, history, torch.zeros_like(end), end, by_slot=False))


def moved(table: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Return integers on the device, without waiting for it."""
    table = torch.as_tensor(table)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def parents_of(first_child: Tensor, next_sibling: Tensor) -> Tensor:
    """Return the parent of each node of draft trees, -1 for a root, by pointer jumping: [trees, nodes] integers, as are
    SGLang's `retrieve_next_token` and `retrieve_next_sibling`, -1 for none."""
    trees, nodes = first_child.shape
    index = torch.arange(nodes, device=first_child.device).expand(trees, nodes)

    def inverse(link: Tensor) -> Tensor:
        """Return which node's link leads to each node, -1 where none does."""
        source = torch.full((trees, nodes + 1), -1, dtype=torch.int64, device=link.device)
        return source.scatter_(1, torch.where(link >= 0, link, nodes).long(), index)[:, :nodes]

    before = inverse(next_sibling)
    first = torch.where(before >= 0, before, index)
    for _ in range(nodes.bit_length()):
        first = first.gather(1, first)
    return inverse(first_child).gather(1, first)


def receive_sets(catalogue: Catalogue, carried: EngineRequest, custom: dict[str, Any]) -> list[ItemSet]:
    """Return the sets of a request, and take their texts out of its `custom_params`. One that is here is not read: the
    prompts of a batch all bring it. Raises ItemSetError for one that is not known, or whose tables are damaged."""
    sets = list[ItemSet]()
    for ref, text in zip_longest(carried.refs, custom.pop(SETS, ())):
        sent = catalogue.inline(ref.reference) is None and text
        sets.append(catalogue.receive(msgspec.json.decode(sent, type=SetRef) if sent else ref).item_set)
    return sets


@hook("sglang.srt.model_executor.model_runner:ModelRunner._preprocess_logits")
def preprocess_logits(original: Callable[..., Any], logits_output: Any, sampling_info: Any) -> Any:
    """The mask of the rows with item sets, after that of grammars."""
    result = original()
    if (noted := getattr(sampling_info, "item_sets", None)) is not None and (sampler := current()) is not None:
        numbers, rows = noted
        if sampler.sanitizes_nan:  # SGLang does that after this, to -1e30, which it then makes of illegal tokens' -inf
            logits_output.next_token_logits.nan_to_num_(nan=-1e20, posinf=1e30, neginf=-1e20)
        sampler.arena.use(numbers)
        sampler.slots.step(rows, logits_output.next_token_logits)
    return result


@hook("sglang.srt.layers.sampler:Sampler.forward")
def sample(original: Callable[..., Any], sampling_info: Any) -> Any:
    """All ranks sample the same token."""
    if getattr(sampling_info, "item_sets", None) is None:
        return original()
    synchronised = copy.copy(sampling_info)
    synchronised.grammars = True  # with which all ranks must: masked rows have more near ties
    return original(sampling_info=synchronised)
