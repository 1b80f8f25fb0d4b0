"""A draft head: the best items of a set from one forward pass of a model (NEZHA, sections 3.1 to 3.4).

The prompt is followed by L placeholder tokens, and one pass gives L + 1 hidden states: h_0 at the prompt's last token,
h_1 to h_L at the placeholders. From these the head drafts items of up to L tokens, without another pass:

    s_1 = h_0;  p_l = softmax(W_l (h_l + s_l));  s_{l+1} = tanh(A_l s_l + B_l e_l + b_l)

where e_l is the head's own embedding of the token chosen at level l. By `ranking.beams`, each draft is an item.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.masking.arena import Arena
from itemset.ranking.beams import Beams
from itemset.ranking.search import Width
from itemset.text import TokenizerId
from itemset.trie.levels import LevelPlan

FORMAT, VERSION = "itemset draft head", "1"


class DraftHead(nn.Module):
    """Drafts the tokens of items from the hidden states of one pass: `levels` tokens, the L above."""

    def __init__(
        self, codes: Sequence[Any], placeholders: Sequence[int], *, hidden_size: int, vocab_size: int,
        tokenizer: TokenizerId | None = None, name: str = "the draft head",
    ) -> None:  # fmt: skip
        """codes: per level, token ids in any order. placeholders: the L token ids that stand after a prompt.
        hidden_size, vocab_size, tokenizer: of the model, the last if it is known. name: what errors call the head.
        Raises ItemSetError for ids outside the vocabulary, or if there are not as many placeholders as levels."""
        super().__init__()
        self.name, self.hidden_size, self.vocab_size, self.tokenizer = name, hidden_size, vocab_size, tokenizer
        self.placeholders = tuple(int(token) for token in placeholders)
        rows = [torch.as_tensor(row, dtype=torch.int64).unique() for row in codes]
        if not rows or len(rows) != len(self.placeholders):
            raise ItemSetError(
                f"{name} has {len(rows)} levels and {len(self.placeholders)} placeholders: give as many, at least one"
            )
        for what, ids in [("a code", torch.cat(rows)), ("a placeholder", torch.tensor(self.placeholders))]:
            if not all(map(len, rows)) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                raise ItemSetError(
                    f"{name} has a level without codes, or {what} outside the vocabulary of {vocab_size:,} tokens: "
                    "give the token ids of the model's own tokenizer"
                )
        self.levels = len(rows)
        self.row_size = max(hidden_size, 1 + max(map(len, rows)))  # numbers that a beam has at once
        for level, row in enumerate(rows):
            self.register_buffer(f"codes_{level}", row)
        # The last level's token is followed by nothing: no embedding and no transition of it.
        self.embeddings = nn.ModuleList(nn.Embedding(len(row), hidden_size) for row in rows[:-1])
        self.transitions = nn.ModuleList(nn.RNNCell(hidden_size, hidden_size) for _ in rows[:-1])
        self.logits = nn.ModuleList(nn.Linear(hidden_size, len(row), bias=False) for row in rows)

    @property
    def codes(self) -> list[Tensor]:
        """Return the token ids that may stand at each level, int64 [T_l], ascending: others have probability zero."""
        return [self.get_buffer(f"codes_{level}") for level in range(self.levels)]

    def code_logits(self, level: int, hidden: Tensor, state: Tensor) -> Tensor:
        """Return the logits of a level's codes, [..., T_l] float32. hidden, state: h_l and s_l, [..., d]."""
        return self.logits[level](hidden + state).float()

    def advance(self, level: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Return s_{l+1} of states [n, d] and the tokens chosen at the level, [n] int64. Others count as some code."""
        codes = self.get_buffer(f"codes_{level}")
        places = torch.searchsorted(codes, tokens).clamp(max=len(codes) - 1)
        return self.transitions[level](self.embeddings[level](places), state)

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the cross entropy of items, summed over the levels and averaged over the items (equation 6).

        hidden: [n, L + 1, d], h_0 to h_L of each prompt. tokens: [n, L] int64, the items that followed. Raises
        ItemSetError for a token that is no code of its level.
        """
        state, total = hidden[:, 0], hidden.new_zeros((), dtype=torch.float32)
        for level, codes in enumerate(self.codes):
            chosen = tokens[:, level].contiguous()
            if not (known := torch.isin(chosen, codes)).all():
                bad = int(chosen[~known][0])
                raise ItemSetError(f"token {bad} is no code of level {level} of {self.name}: train another with it")
            logits = self.code_logits(level, hidden[:, level + 1], state)
            total = total + cross_entropy(logits, torch.searchsorted(codes, chosen))
            if level + 1 < self.levels:
                state = self.advance(level, state, chosen)
        return total

    def check(
        self, *, hidden_size: int | None = None, vocab_size: int | None = None, fingerprint: str | None = None
    ) -> None:
        """Raise ItemSetError unless the head is for a model of these sizes, and this tokenizer. None: not known."""
        mend = "give the model that was trained with it, or train the head with this model, by `itemset train-head`"
        sizes = ("a hidden size", self.hidden_size, hidden_size), ("a vocabulary", self.vocab_size, vocab_size)
        for what, own, given in sizes:
            if given is not None and own != given:
                raise ItemSetError(f"{self.name} is for a model with {what} of {own:,}, this one has {given:,}: {mend}")
        if fingerprint is not None and self.tokenizer is not None and self.tokenizer.fingerprint != fingerprint:
            own_one = f"{self.tokenizer.name} ({self.tokenizer.fingerprint[:12]})"
            raise ItemSetError(
                f"{self.name} was trained with the tokenizer {own_one}, not with this one ({fingerprint[:12]}): {mend}"
            )

    def check_set(self, item_set: ItemSet) -> None:
        """Raise ItemSetError unless the head can draft all items of a set, as far as their lengths tell."""
        if item_set.longest > self.levels:
            raise ItemSetError(
                f"{self.name} drafts {self.levels} tokens, and the item set has an item of {item_set.longest}: train "
                f"a head of {item_set.longest} levels, or build the set without longer items"
            )
        self.check(fingerprint=None if item_set.tokenizer is None else item_set.tokenizer.fingerprint)

    @torch.no_grad()
    def beams(
        self, arena: Arena, numbers: Sequence[int], plan: LevelPlan, hidden: Tensor, *, width: Width, k: int,
        renormalised: bool = False, boost: float = 1.0,
    ) -> Beams:  # fmt: skip
        """Return the beams of some lists at their end: `Beams.found` has the items, each one of its list's set.
        A score is the sum of an item's log-probabilities by the head, shared by its own codes alone; the end costs
        nothing. Items with other tokens are not found, nor longer ones, but with `renormalised`: there what follows
        once an item stands alone costs nothing, so it may be any tokens. Nothing is read back.

        hidden: [lists, L + 1, d] of any floating dtype, on the arena's device. The others: as for `Beams`. Raises
        ValueError for another shape, and as `Beams` does.
        """

        shape = (len(numbers), self.levels + 1, self.hidden_size)
        if hidden.shape != shape:
            raise ValueError(f"hidden states of shape {tuple(hidden.shape)}: {self.name} takes {shape} for these lists")
        beams = Beams(
            arena, numbers, plan, width=width, k=k, end_token=None, renormalised=renormalised,
            stepwise=not renormalised, longest=None if renormalised else self.levels, boost=boost,
        )  # fmt: skip
        hidden = hidden.to(next(self.parameters()).dtype)
        states = hidden[:, :1]
        for level, codes in enumerate(self.codes):
            if not beams.passes_left:
                break
            if level:
                chosen = beams.tokens[:, : beams.rows, level - 1].clamp(min=0)
                parents = beams.parents[:, : beams.rows, None].expand(-1, -1, self.hidden_size)
                before = states.gather(1, parents).flatten(0, 1)
                states = self.advance(level - 1, before, chosen.flatten()).unflatten(0, chosen.shape)
            found = self.code_logits(level, hidden[:, level + 1, None], states).log_softmax(-1).flatten(0, 1)
            # All other tokens have a column, too, the last one.
            columns = torch.full((self.vocab_size,), len(codes), dtype=torch.int32, device=codes.device)
            columns.index_copy_(0, codes, torch.arange(len(codes), dtype=torch.int32, device=codes.device))
            sums = None if renormalised else torch.zeros(*states.shape[:2], 1, device=codes.device)
            beams.round(pad(found, (0, 1), value=-torch.inf)[:, None], columns=columns, sums=sums)
        return beams

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the head into a safetensors file, with all that `load` needs in its metadata.

        Raises ItemSetError if it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        about = {name: str(getattr(self, name)) for name in ("levels", "hidden_size", "vocab_size")}
        about |= {"format": FORMAT, "version": VERSION, "placeholders": json.dumps(self.placeholders)}
        if self.tokenizer is not None:
            about |= {"tokenizer": self.tokenizer.name, "fingerprint": self.tokenizer.fingerprint}
        unfinished = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
        try:
            save_file({name: value.contiguous() for name, value in self.state_dict().items()}, unfinished, about)
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            raise ItemSetError(f"{os.fspath(path)} cannot be written ({error}): name a file in a folder") from error
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> "DraftHead":
        """Open a file that `save` has written. The head is on `device`, without gradients.

        Raises ItemSetError that names the file: it is missing, damaged, no draft head, or one of another version.
        """
        from safetensors import SafetensorError, safe_open

        name, again = f"the draft head {os.fspath(path)}", "write it again with DraftHead.save"
        try:
            with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
                about: Mapping[str, str] = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            mend = "give a safetensors file that DraftHead.save has written"
            raise ItemSetError(f"{name} cannot be read ({error}): {mend}") from error
        if about.get("format") != FORMAT:
            raise ItemSetError(f"{os.fspath(path)} is no draft head: give a file that DraftHead.save has written")
        if about.get("version") != VERSION:
            raise ItemSetError(f"{name} has the version {about.get('version')}, this library reads {VERSION}: {again}")
        try:
            sizes: dict[str, Any] = {size: int(about[size]) for size in ("hidden_size", "vocab_size")}
            codes = [tensors[f"codes_{level}"] for level in range(int(about["levels"]))]
            tokenizer = TokenizerId(about["tokenizer"], about["fingerprint"]) if "fingerprint" in about else None
            head: DraftHead = cls(codes, json.loads(about["placeholders"]), **sizes, tokenizer=tokenizer, name=name)
            head.to(device).load_state_dict(tensors)
        except ItemSetError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ItemSetError(f"{name} is damaged ({type(error).__name__}: {reason}): {again}") from error
        head.eval().requires_grad_(False)
        return head
