"""An item set: its trie, the items' keys and the tokenizer it was made with; built, saved, opened, asked."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from itemset import index_file, notices, numbering, walk
from itemset.errors import ItemSetError
from itemset.index_file import Header
from itemset.keys import as_keys, from_sections, keys_at, positions_of, to_sections
from itemset.rows import MAX_ITEM_TOKENS, MAX_TOKEN_ID, Rows, as_rows, sort_unique, token_dtype
from itemset.text import TokenizerId, encode, fingerprint, identify
from itemset.trie import BLOCK, Tables, Trie, build_trie

_AGAIN = "build it again with `itemset build`"
_VERIFIED_TOKENS = 1 << 24  # that `verify` unfolds at once


class ItemSet:
    """A finite set of items as a trie. Immutable; make one with `build`, `build_text` or `load`."""

    def __init__(
        self,
        trie: Trie,
        item_keys: pa.Array,
        *,
        digest: str | None = None,
        duplicates: int = 0,
        vocab_size: int | None = None,
        tokenizer: TokenizerId | None = None,
        prefix: str = "",
    ) -> None:
        self.trie = trie
        self._keys = item_keys
        self._digest = digest
        self.duplicates = duplicates
        """Items of the input that were folded into an earlier equal one."""
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.prefix = prefix
        """Text that stands before every item, as given to `build_text`."""
        self._same_tokenizer: Any = None  # the one that was found to be the set's own

    def __len__(self) -> int:
        return self.trie.items

    def __repr__(self) -> str:
        return f"ItemSet({len(self):,} items of {self.shortest} to {self.longest} tokens, {self.nbytes:,} bytes)"

    @property
    def shortest(self) -> int:
        """Tokens of the shortest item."""
        return self.trie.shortest

    @property
    def longest(self) -> int:
        """Tokens of the longest item."""
        return self.trie.longest

    @property
    def nbytes(self) -> int:
        """Bytes of the tables, keys not counted. In an arena they take up to 896 more: `arena.room_for`."""
        return self.trie.nbytes

    @property
    def sections(self) -> dict[str, int]:
        """Bytes of each array in the file."""
        return {name: array.nbytes for name, array in self._arrays().items()}

    @property
    def digest(self) -> str:
        """Hex digest of the tables: the same for two sets of the same items, whatever their keys."""
        if self._digest is None:
            self._digest = _digest(self.trie.tables)
        return self._digest

    @functools.cached_property
    def token_ids(self) -> NDArray[np.int64]:
        """Every token id that occurs in an item, ascending. Read off the tables once."""
        tables, tail_tokens = self.trie.tables, self.trie.tail_tokens
        runs, ids = walk.token_runs(tables, tail_tokens), 1 << tables.token_bits
        if ids > max(1 << 16, 8 * (len(tables.labels) + tail_tokens)):  # few tokens, some with high ids
            return np.unique(np.concatenate(list(runs))).astype(np.int64)
        seen = np.zeros(ids, np.bool_)
        for run in runs:
            seen[run[run < ids]] = True
        return np.flatnonzero(seen)

    def occurring(self, token_ids: Iterable[int]) -> list[int]:
        """Those of `token_ids` that occur in an item, ascending."""
        asked = np.array(sorted(token_ids), np.int64)
        first, behind = (np.searchsorted(self.token_ids, asked, side) for side in ("left", "right"))
        return [int(token) for token in asked[first < behind]]

    def children(self, prefix_tokens: Sequence[int] = ()) -> tuple[NDArray[Any], bool]:
        """Tokens that may follow `prefix_tokens`, ascending, and whether an item ends there.

        Raises ItemSetError (a ValueError) where no item starts with `prefix_tokens`.
        """
        state = 0
        if np.ndim(prefix_tokens) != 1:
            raise ItemSetError("children() takes the tokens of one prefix, a flat list")
        for token in prefix_tokens:
            state = walk.advance(self.trie.tables, state, token) if 0 <= token <= MAX_TOKEN_ID else walk.DEAD
        if state == walk.DEAD:
            raise ItemSetError(f"no item starts with the tokens {list(prefix_tokens)}")
        return walk.children(self.trie.tables, state)

    def lookup(self, items: Any) -> NDArray[np.int64] | list[str]:
        """The key of each item: int64 [N], or a list of strings where the keys are strings.

        items: as for `build`. Raises ItemSetError for the first that is no item of the set.
        """
        if not len(items):
            return keys_at(self._keys, np.zeros(0, np.int64))
        rows = as_rows(items)
        numbers = self._numbers_of(rows)
        if (missing := np.flatnonzero(numbers < 0)).size:
            i = int(missing[0])
            item = rows.tokens[rows.offsets[i] : rows.offsets[i + 1]].tolist()
            raise ItemSetError(f"the tokens {item} (number {i} of those asked) are no item of the set")
        return keys_at(self._keys, numbers)

    def find(self, tokens: Sequence[int]) -> tuple[int | str, bool] | None:
        """The key of the item with these tokens, and whether it is a prefix of another; None where it is no item.

        tokens: of one item, each 0 or more. `lookup` of one item, without an error to raise.
        """
        number = int(self._numbers_of(as_rows([tokens]))[0])
        if number < 0:
            return None
        tables = self.trie.tables
        key = self._keys[number].as_py()
        return key, number >= len(tables.labels) - (len(tables.row_offsets) - 2)

    def lookup_text(self, texts: Sequence[str], tokenizer: Any) -> NDArray[np.int64] | list[str]:
        """The key of each text's item, encoded as `build_text` does (after the set's prefix): as `lookup`.

        tokenizer: the one that the set was built with. Raises ItemSetError: another tokenizer, a text that cannot be
        encoded (see `text.encode`), or the first that is no item of the set.
        """
        self.check_tokenizer(tokenizer)
        rows = Rows(*encode(texts, tokenizer, prefix=self.prefix))
        numbers = self._numbers_of(rows)
        if (missing := np.flatnonzero(numbers < 0)).size:
            i = int(missing[0])
            raise ItemSetError(f"the text {texts[i]!r:.60} (number {i} of those asked) is no item of the set")
        return keys_at(self._keys, numbers)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises ItemSetError where the set was built with another tokenizer."""
        if self.tokenizer is None or tokenizer is self._same_tokenizer:
            return
        if fingerprint(tokenizer) != self.tokenizer.fingerprint:
            raise ItemSetError(f"the set was built with another tokenizer, {self.tokenizer.name}: give that one")
        self._same_tokenizer = tokenizer

    def _numbers_of(self, rows: Rows) -> NDArray[np.int64]:
        """The item number of each row, -1 where it is no item."""
        if not len(rows):
            return np.zeros(0, np.int64)
        numbers = numbering.numbers_of(self.trie.tables, self._terminal_rank, rows)
        numbers[numbers >= len(self)] = -1  # of a damaged file
        return numbers

    def tokens(self, item_keys: Iterable[int] | Iterable[str] | NDArray[Any]) -> list[list[int]]:
        """The tokens of the items with these keys (the first such item). Raises ItemSetError for an unknown key."""
        return self._items_at(positions_of(self._keys, item_keys))

    def items(self) -> list[list[int]]:
        """The tokens of every item, in the set's own order. For sets that fit memory as Python lists."""
        return self._items_at(np.arange(len(self)))

    def _items_at(self, numbers: NDArray[np.int64]) -> list[list[int]]:
        rows = numbering.items_at(self.trie.tables, self._terminal_rank, numbers, self.longest)
        return [part.tolist() for part in np.split(rows.tokens, rows.offsets[1:-1])]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index file; an existing one is replaced at once. Raises ItemSetError where it cannot be written."""
        index_file.write(path, self._header(), self._arrays())

    def to_bytes(self) -> bytes:
        """The index file in memory, for `from_bytes`."""
        return index_file.to_bytes(self._header(), self._arrays())

    @functools.cached_property
    def _terminal_rank(self) -> NDArray[np.uint32]:
        return numbering.rank_terminals(self.trie.tables.terminal)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        tables = self.trie.tables._asdict()
        del tables["token_bits"]
        return tables | to_sections(self._keys)

    def _header(self) -> Header:
        return Header(
            items=self.trie.items,
            duplicates=self.duplicates,
            shortest=self.shortest,
            longest=self.longest,
            level_nodes=self.trie.level_nodes,
            level_edges=self.trie.level_edges,
            tail_tokens=self.trie.tail_tokens,
            token_bits=self.trie.tables.token_bits,
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            prefix=self.prefix,
            digest=self.digest,
        )


def build(
    items: Any,
    *,
    keys: Iterable[int] | Iterable[str] | NDArray[Any] | None = None,
    vocab_size: int | None = None,
    tokenizer: Any = None,
    prefix: str = "",
) -> ItemSet:
    """The set of these items, in any order; equal ones are folded and the first one's key stays.

    items: an integer matrix [N, L], `Rows`, or an iterable of token-id lists of any lengths >= 1.
    keys: N integers or N strings; the row numbers where None.
    vocab_size: token ids must be below it; the tokenizer's where None and there is one.
    tokenizer: the Hugging Face tokenizer the ids belong to; an engine with another one refuses the index.
    Raises ItemSetError as `rows.as_rows`, `keys.as_keys` and `trie.build_trie` do.
    """
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    given = as_rows(items, vocab_size)
    total = len(given)
    item_keys = None if keys is None else as_keys(keys, total)
    rows, order, lcp = sort_unique(given)
    folded = notices.first_folded(given, len(rows), order, item_keys)
    del given
    trie, members = build_trie(rows, lcp)
    del rows, lcp
    kept = members if order is None else order[members]
    item_set = ItemSet(
        trie,
        pa.array(kept.astype(np.int64)) if item_keys is None else item_keys.take(pa.array(kept)),
        duplicates=total - trie.items,
        vocab_size=vocab_size,
        tokenizer=identify(tokenizer) if tokenizer is not None else None,
        prefix=prefix,
    )
    notices.of_build(item_set, tokenizer, keys_given=keys is not None, folded=folded)
    return item_set


def build_text(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    keys: Iterable[int] | Iterable[str] | NDArray[Any] | None = None,
    prefix: str = "",
    progress: bool = False,
) -> ItemSet:
    """The set of these texts, each as the one token sequence that `tokenizer` gives it (behind `prefix`).

    tokenizer: the model's own Hugging Face tokenizer. progress: show a bar on long work.
    Raises ItemSetError as `build` and `text.encode` do.
    """
    tokens, offsets = encode(texts, tokenizer, prefix=prefix, progress=progress)
    return build(Rows(tokens, offsets), keys=keys, tokenizer=tokenizer, prefix=prefix)


def load(path: str | os.PathLike[str], *, check: bool = True) -> ItemSet:
    """Open an index file by memory map. Raises ItemSetError that says what is wrong with the file.

    check: compare every section with its checksum first, which reads the file once. Without it opening takes
    milliseconds at any size; a damaged file may then answer wrongly, but no walk reads outside the tables.
    The set reads from the file for as long as it lives. You may replace the file, as `save`, `itemset build` and `mv`
    do, or delete it. Do not change it in place, as `cp` over it does: answers would change with it, and where the file
    gets shorter the system ends the process (SIGBUS).
    """
    return from_index(*index_file.read(path), name=str(path), check=check)


def from_bytes(data: bytes, name: str = "the index") -> ItemSet:
    """The set that `ItemSet.to_bytes` wrote. Raises ItemSetError as `load` does."""
    return from_index(*index_file.parse(data, name), name=name, check=True)


def verify(path: str | os.PathLike[str]) -> ItemSet:
    """Re-read the whole file: checksums, the order of the tables, and every item through the trie.

    Raises ItemSetError at the first fault.
    """
    item_set = load(path)
    trie, terminal_rank = item_set.trie, item_set._terminal_rank
    if not numbering.in_order(trie.tables, trie.tail_tokens):
        raise ItemSetError(f"{path} is corrupted, its tables are no trie: {_AGAIN}")
    numbers = np.arange(len(item_set))
    for part in np.array_split(numbers, -(-len(numbers) * trie.longest // _VERIFIED_TOKENS)):
        rows = numbering.items_at(trie.tables, terminal_rank, part, trie.longest)
        back = numbering.numbers_of(trie.tables, terminal_rank, rows)
        if (wrong := np.flatnonzero(back != part)).size:
            raise ItemSetError(
                f"{path} is corrupted, item {int(part[wrong[0]])} does not lead back to itself: {_AGAIN}"
            )
    if item_set.digest != _digest(trie.tables):
        raise ItemSetError(f"{path} is corrupted, its digest does not match its tables: {_AGAIN}")
    return item_set


def from_index(header: Header, arrays: dict[str, NDArray[Any]], *, name: str, check: bool) -> ItemSet:
    """The set over what `index_file` has read. Raises ItemSetError as `load` does."""
    if check:
        index_file.check(header, arrays, name)
    try:
        tables = Tables(**{field: arrays[field] for field in Tables._fields[:-1]}, token_bits=header.token_bits)
        item_keys = from_sections(arrays)
        trie = Trie(
            tables,
            header.items,
            header.shortest,
            header.longest,
            header.level_nodes,
            header.level_edges,
            header.tail_tokens,
        )
        _check_shapes(trie, item_keys)
    except KeyError as missing:
        raise ItemSetError(f"{name} is corrupted, it has no section {missing}: {_AGAIN}") from missing
    except ValueError as error:
        raise ItemSetError(f"{name} is corrupted, {error}: {_AGAIN}") from error
    return ItemSet(
        trie,
        item_keys,
        digest=header.digest,
        duplicates=header.duplicates,
        vocab_size=header.vocab_size,
        tokenizer=header.tokenizer,
        prefix=header.prefix,
    )


def _check_shapes(trie: Trie, item_keys: pa.Array) -> None:
    """That the arrays have the types and lengths that the walks rely on, and that no row leaves the edges.

    Raises ValueError. Reads `row_offsets` and `terminal`, the smallest of the arrays.
    """
    tables, levels = trie.tables, len(trie.level_nodes)
    if (
        not levels == len(trie.level_edges) > 0
        or min(*trie.level_nodes, *trie.level_edges) < 1
        or not 1 <= tables.token_bits <= 31
        or not 1 <= trie.shortest <= trie.longest <= MAX_ITEM_TOKENS
        or trie.tail_tokens < 0
    ):
        raise ValueError("its counts do not fit each other")
    nodes, edges = sum(trie.level_nodes), sum(trie.level_edges)
    blocks = -(-edges // BLOCK)
    expected = {
        "row_offsets": (nodes + 1, {"uint32"}),
        "terminal": (-(-nodes // 32), {"uint32"}),
        "labels": (edges, {token_dtype((1 << tables.token_bits) - 1).__name__}),
        "targets": (edges, {"uint16", "uint32"}),
        "node_base": (blocks, {"uint32"}),
        "tail_base": (blocks, {"uint32"}),
        "tails": (-(-trie.tail_tokens * (tables.token_bits + 1) // 32) + 1, {"uint32"}),
    }
    for field, (count, dtypes) in expected.items():
        array = getattr(tables, field)
        if len(array) != count or array.dtype.name not in dtypes:
            raise ValueError(f"section {field} does not fit the header")
    rows = tables.row_offsets
    if rows[0] != 0 or rows[-1] != edges or np.any(rows[1:] < rows[:-1]):
        raise ValueError("section row_offsets does not ascend to the number of edges")
    items = edges - (nodes - 1) + np.count_nonzero(np.unpackbits(tables.terminal.view(np.uint8)))
    if not len(item_keys) == trie.items == items:
        raise ValueError("its number of items does not fit its tables or its keys")


def _digest(tables: Tables) -> str:
    digest = hashlib.blake2b(tables.token_bits.to_bytes(4, "little"), digest_size=16)
    for array in tables[:-1]:
        digest.update(array.dtype.str.encode() + len(array).to_bytes(8, "little"))
        digest.update(array.data)
    return digest.hexdigest()
