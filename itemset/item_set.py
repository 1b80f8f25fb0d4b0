"""An item set: its trie, the items' keys and the tokenizer it was made with. Built, saved, updated, looked up."""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from itemset.errors import ItemSetError, shown
from itemset.text import Escape, Lossy, TokenizerId, encode, encode_pieces, fingerprint, identify
from itemset.trie import attributes as attribute_columns
from itemset.trie import file as index_file
from itemset.trie import numbering, potential, walk
from itemset.trie.keys import KeyList, Keys, as_keys, in_item_order, values_to_sections
from itemset.trie.levels import LevelPlan, ready_masks
from itemset.trie.rows import MAX_ITEMS, MAX_TOKEN_ID, Distinct, Rows, as_rows, sort_unique
from itemset.trie.tables import Trie, build_trie
from itemset.trie.update import merged
from itemset.trie.validate import digest_of, lengths_in_order

_ITEMS_AT_ONCE = 1 << 20  # whose tokens are in memory together


class Origin(NamedTuple):
    """How a set's items were made: the number that token ids stay below, and what texts were encoded with."""

    vocab_size: int | None = None
    tokenizer: TokenizerId | None = None
    prefix: str = ""
    escape: Escape | None = None


class ItemSet:
    """A finite set of items as a trie. Immutable; make one with `build`, `build_text` or `load`."""

    def __init__(
        self, trie: Trie, keys: Keys, origin: Origin = Origin(), *,  # noqa: B008  it is immutable
        digest: str | None = None, duplicates: int = 0, attributes: NDArray[np.uint8] | None = None,
    ) -> None:  # fmt: skip
        self.trie = trie
        self.shortest, self.longest = trie.shortest, trie.longest
        """Tokens of the shortest and of the longest item."""
        self.base: ItemSet | None = None  # of a view: the set, or the view, whose tables it shares
        self.own: Mapping[str, NDArray[Any]] = trie.tables.sections  # arrays that it shares with no base, by name
        self._keys, self._attributes, self._digest, self._origin = keys, attributes, digest, origin
        self.rows_of: tuple[ItemSet, NDArray[np.int64]] | None = None
        """Of a set that was selected from another by keys: that set, and the place of each of `keys` in it."""
        self.duplicates = duplicates
        """Items of the input that equal an earlier one."""
        self.vocab_size, self.tokenizer, self.prefix, self.escape = origin
        """`prefix`, `escape`: as given to `build_text`."""
        self.temperature = 1.0  # of draws, above 1: see `select.views.tempered`
        self._same_tokenizer: Any = None  # the one that was found to be the set's own

    def __len__(self) -> int:
        return self.trie.items

    def __repr__(self) -> str:
        return f"ItemSet({len(self):,} items of {self.shortest} to {self.longest} tokens, {self.nbytes:,} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of the tables, keys not counted. In an arena they take more: `arena.room_for`."""
        return self.trie.nbytes

    @property
    def whole(self) -> "ItemSet":
        """Return the set that a view's tables come from in the end; of a set, itself."""
        return self if self.base is None else self.base.whole

    @property
    def keys(self) -> pa.Array:
        """Every key, int64 or large_string: by item number, an item's own in the order of the input."""
        return self._keys.values

    @property
    def key_starts(self) -> NDArray[np.uint32] | None:
        """Return where each item's keys begin in `keys`, and their end: [items + 1]. None if each item has one key."""
        return self._keys.starts

    @functools.cached_property
    def attributes(self) -> pa.Table:
        """Attributes, a row for each of `keys`, without columns if there are none. Texts may be dictionary-encoded.

        The first time, all of them are read and checked: raises ItemSetError if they are damaged.
        """
        return attribute_columns.from_section(self._attributes, len(self.keys))

    @functools.cached_property
    def in_order(self) -> bool:
        """Return whether the tables are a trie in the order of the items: an index file may hold anything."""
        return lengths_in_order(self.trie) is not None

    @property
    def shared(self) -> int:
        """Items with several keys."""
        return 0 if self.key_starts is None else int(np.count_nonzero(np.diff(self.key_starts) > 1))

    @property
    def sections(self) -> dict[str, int]:
        """Bytes of each array in the file."""
        return {name: array.nbytes for name, array in self._arrays().items()}

    @functools.cached_property
    def digest(self) -> str:
        """Hex digest of the tables: equal for two sets of the same items, whatever their keys."""
        return self._digest or digest_of(self.trie.tables)

    @functools.cached_property
    def level_plan(self) -> LevelPlan:
        """Return how wide its levels are, for a search over it on a device. Read off the tables once."""
        return LevelPlan.of(self.trie) if self.base is None else self.base.level_plan

    @functools.cached_property
    def ready(self) -> NDArray[np.uint32]:
        """Masks of the first levels' nodes (`trie.levels`). Exclusions have their base's, which let more through."""
        if self.base is not None and "alive" not in self.own:
            return self.base.ready
        return ready_masks(self.trie)

    @property
    def resident(self) -> dict[str, NDArray[Any]]:
        """Return what an arena holds of it and of no base, by name: `own`, and ready masks."""
        has_masks = (self.base is None or "alive" in self.own) and len(self.ready)
        return {**self.own, **({"ready": self.ready} if has_masks else {})}

    @functools.cached_property
    def token_ids(self) -> NDArray[np.int64]:
        """Every token id that occurs in an item, ascending. Read off the tables once."""
        return numbering.token_ids(self.trie) if self.base is None else self.base.token_ids

    def occurring(self, token_ids: Iterable[int]) -> list[int]:
        """Return those of `token_ids` that occur in an item, ascending."""
        given = np.array(sorted(token_ids), np.int64)
        first, after = (np.searchsorted(self.token_ids, given, side) for side in ("left", "right"))
        return [int(token) for token in given[first < after]]

    def children(self, prefix_tokens: Sequence[int] = ()) -> tuple[NDArray[Any], bool]:
        """Return the tokens that may follow a prefix, ascending, and whether an item ends there.

        Raises ItemSetError (a ValueError) if no item starts with it.
        """
        state = 0
        if np.ndim(prefix_tokens) != 1:
            raise ItemSetError("children() takes the tokens of one prefix, a flat list")
        for token in prefix_tokens:
            state = walk.advance(self.trie.tables.pointers, state, token) if 0 <= token <= MAX_TOKEN_ID else walk.DEAD
        if state == walk.DEAD:
            raise ItemSetError(f"no item starts with the tokens {list(prefix_tokens)}")
        return walk.children(self.trie.tables, state)

    def lookup(self, items: Any) -> NDArray[np.int64] | list[str]:
        """Return the key of each item, the first if it has several: int64 [N], or a list if the keys are strings.

        items: as for `build`. Raises ItemSetError for the first that is no item of the set.
        """
        return self._keys.first(self._numbered(items))

    def keys_of(self, items: Any) -> list[list[int | str]]:
        """Return all keys of each item, in the order in which they were given to `build`. items: as for `lookup`."""
        return self._keys.every(self._numbered(items))

    @property
    def attribute_schema(self) -> pa.Schema:
        """Return the names and types of the attributes that `attributes_of` reads."""
        return (self.whole.rows_of or (self,))[0].attributes.schema

    def attributes_of(self, items: Any, names: Sequence[str]) -> list[list[dict[str, Any]]]:
        """Return of each item the attributes of each of its keys, in the order of `keys_of`, as JSON has them.

        items: as for `lookup`. names: of attributes; those that the set has not are omitted.
        """
        places, counts = self._keys.places_at(self._numbered(items))
        of, at = self.whole.rows_of or (self, None)
        table = of.attributes.select([name for name in names if name in of.attributes.column_names])
        each = iter(attribute_columns.rows_at(table, places if at is None else at[places]))
        return [list(islice(each, count)) for count in counts]

    @property
    def is_steered(self) -> bool:
        """Return whether its items have boosts: see `view`."""
        return bool(len(self.trie.tables.potential) or len(self.trie.tables.boosted))

    @property
    def most_boost(self) -> float:
        """Return a bound of all boosts, 0 without any."""
        return float(potential.potential_of(self.trie.tables.pointers, potential.ROOT))

    @functools.cached_property
    def heights(self) -> NDArray[np.uint16]:
        """Return of each edge how many tokens the longest item has from there on. Read off the tables once."""
        return potential.heights(self.trie.tables) if self.base is None else self.base.heights

    def boosts_of(self, items: Any) -> NDArray[np.float64]:
        """Return the boost of each item [N], 0 without one. items: as for `lookup`."""
        return potential.boosts_of(self.trie.tables, self.whole.trie.tables, self._numbered(items))

    def _numbered(self, items: Any, texts: Sequence[str] | None = None) -> NDArray[np.int64]:
        """Return the number of each item. items: as for `lookup`. texts: what errors call them."""
        items = items if hasattr(items, "__len__") else list(items)
        if not len(items):
            return np.zeros(0, np.int64)
        rows = as_rows(items)
        numbers = self._numbers_of(rows)
        if (numbers < 0).any():
            i = int(numbers.argmin())
            item = rows.tokens[rows.offsets[i] : rows.offsets[i + 1]].tolist()
            what, are = (f"the tokens {item}", "are") if texts is None else (f"the text {texts[i]!r:.60}", "is")
            raise ItemSetError(f"{what} (number {i} of those asked) {are} no item of the set")
        return numbers

    def find(self, tokens: Sequence[int]) -> tuple[int | str, bool] | None:
        """Return the first key of the item of these tokens, and whether it begins another item; None if it is none."""
        may_be = 0 < len(tokens) <= self.longest and 0 <= min(tokens) <= max(tokens) <= MAX_TOKEN_ID
        number = int(self._numbers_of(as_rows([tokens]))[0]) if may_be else -1
        if number < 0:
            return None
        tables = self.trie.tables
        (key,) = self._keys.first(np.array([number]))
        return key if isinstance(key, str) else int(key), number >= len(tables.labels) - (len(tables.row_offsets) - 2)

    def lookup_text(self, texts: Sequence[str], tokenizer: Any) -> NDArray[np.int64] | list[str]:
        """Return the first key of each text's item. Texts are encoded as in `build_text`, by the set's own tokenizer.

        Raises ItemSetError: another tokenizer, a text that `text.encode` refuses, or the first that is no item.
        """
        return self._keys.first(self._numbered(self._encode(texts, tokenizer), texts))

    def _encode(self, texts: Iterable[str], tokenizer: Any) -> Rows:
        self.check_tokenizer(tokenizer)
        return Rows(*encode(texts, tokenizer, prefix=self.prefix, escape=self.escape))

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise ItemSetError if the set was built with another tokenizer."""
        if self.tokenizer is None or tokenizer is self._same_tokenizer:
            return
        if fingerprint(tokenizer) != self.tokenizer.fingerprint:
            raise ItemSetError(f"the set was built with another tokenizer, {self.tokenizer.name}: give that one")
        self._same_tokenizer = tokenizer

    def _numbers_of(self, rows: Rows) -> NDArray[np.int64]:
        """Return the item number of each row, -1 if it is no item."""
        whole = self.whole
        numbers = numbering.numbers_of(self.trie.tables, whole.trie.tables, rows)
        numbers[numbers >= len(whole)] = -1  # of a damaged file
        return numbers

    def tokens(self, item_keys: KeyList) -> list[list[int]]:
        """Return the tokens of each key's first item. Raises ItemSetError for an unknown key."""
        return self.items_at(self._keys.numbers_of(item_keys))

    def items(self) -> list[list[int]]:
        """Return the tokens of every item, in the set's own order. For sets that fit memory as Python lists."""
        return self.items_at(np.arange(len(self)))

    def items_at(self, numbers: NDArray[np.int64]) -> list[list[int]]:
        """Return the tokens of the items with these numbers."""
        rows = numbering.items_at(self.whole.trie.tables, numbers, self.longest)
        return [part.tolist() for part in np.split(rows.tokens, rows.offsets[1:-1])] if len(numbers) else []

    def holding(self, token_ids: Iterable[int]) -> NDArray[np.int64]:
        """Return the numbers of the items, ascending, that hold one of these tokens."""
        wanted = np.array([*token_ids], np.int64)
        found = [np.zeros(0, np.int64)]
        for part, rows in self.parts() if len(wanted) else ():
            at = np.flatnonzero(np.isin(rows.tokens, wanted))
            found.append(part[np.unique(np.searchsorted(rows.offsets, at, side="right") - 1)])
        return np.concatenate(found)

    def parts(self) -> Iterator[tuple[NDArray[np.int64], Rows]]:
        """Yield the numbers of all items, and their tokens, as many at a time as may be in memory together."""
        for part in np.array_split(np.arange(len(self)), 1 + len(self) // _ITEMS_AT_ONCE):
            yield part, numbering.items_at(self.whole.trie.tables, part, self.longest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index file; an existing one is replaced at once. Raises ItemSetError: it cannot, or a view."""
        self._refuse_part("save")
        index_file.write(path, self._header(), self._arrays())

    def to_bytes(self) -> bytes:
        """Return the index file as bytes, for `from_bytes`."""
        return index_file.to_bytes(self._header(), self._arrays())

    def updated(
        self, add: Any = None, *, keys: KeyList | None = None, attributes: Any = None, tokenizer: Any = None,
        remove: KeyList = (), missing_ok: bool = False,
    ) -> "ItemSet":  # fmt: skip
        """Return a new set: without the keys `remove` and the items that have no other, and with the items `add`.

        It is byte for byte the set that `build` makes of the items that stay, in their order, and then the new ones.
        add: as for `build`; with `tokenizer`, the set's own, texts. keys, attributes: of these, as for `build`; by
        default keys go on from the highest integer. Raises ItemSetError as `build`, for attributes of other names or
        types than the set's, for a new key that is in the set and not in `remove`, and unless `missing_ok` for a key of
        `remove` that is not there.
        """
        self._refuse_part("update")
        gone = self._keys.gone(remove, missing_ok=missing_ok)
        if tokenizer is not None and add is not None:
            add = self._encode(add, tokenizer)
        given = None if add is None else as_rows(add, self.vocab_size)
        added = 0 if given is None else len(given)
        values = [self.keys] if given is None else [self.keys, self._keys.added(keys, added, gone)]
        columns = attribute_columns.appended(self.attributes, attributes, added)
        total = len(gone) - int(np.count_nonzero(gone)) + added
        if not 0 < total <= MAX_ITEMS:
            raise ItemSetError(f"{total:,} items would be left: a set has 1 to {MAX_ITEMS:,}")
        distinct = merged(self.trie, self.key_starts, ~gone, given)
        return built(distinct, pa.concat_arrays(values), columns, self._origin)

    def respelt(self, numbers: NDArray[np.int64], items: Rows, escape: Escape | None) -> "ItemSet":
        """Return a new set in which the items with these numbers have other tokens, with their keys and attributes.

        Not of a view. items: these tokens. escape: how all items then stand inside a longer text. Raises ItemSetError.
        """
        places, starts = in_item_order(numbers, self.key_starts)
        stays = np.ones(len(self.keys), np.bool_)
        stays[places] = False
        given = as_rows(items, self.vocab_size)
        if starts is not None:
            given = given.take(np.repeat(np.arange(len(given)), np.diff(starts)))
        at = pa.array(places)
        columns = attribute_columns.appended(self.attributes, None, 0)  # texts, and not the numbers that are stored
        columns, keys = pa.concat_tables([columns, columns.take(at)]), pa.concat_arrays([self.keys, self.keys.take(at)])
        distinct = merged(self.trie, self.key_starts, stays, given)
        return built(distinct, keys, columns, self._origin._replace(escape=escape))

    def _refuse_part(self, verb: str) -> None:
        """Raises ItemSetError for a view, and for what `only_keys` gives: both read attributes and boosts elsewhere."""
        if self.base is not None or self.rows_of is not None:
            raise ItemSetError(f"a view cannot be {verb}d: {verb} the set itself, and make the view again")

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays = self.trie.tables.sections | values_to_sections(self._keys.values)
        more = {"key_starts": self._keys.starts, "attributes": self._attributes}
        return arrays | {name: array for name, array in more.items() if array is not None}

    def _header(self) -> index_file.Header:
        trie = self.trie
        return index_file.Header(
            trie.items, self.duplicates, trie.shortest, trie.longest, trie.level_nodes, trie.level_edges,
            trie.tail_tokens, trie.tables.token_bits, *self._origin, self.digest,
        )  # fmt: skip


def build(
    items: Any, *, keys: KeyList | None = None, vocab_size: int | None = None, tokenizer: Any = None, prefix: str = "",
    escape: Escape | None = None, attributes: Any = None,
) -> ItemSet:  # fmt: skip
    """Build the set of these items, in any order. Equal ones become one item, with the keys of all in their order.

    items: an integer matrix [N, L], `Rows`, or an iterable of token-id lists of any lengths >= 1; with a tokenizer also
        of lists of its tokens by name, such as ["<a_1>", "<b_2>"].
    keys: N integers or N strings; by default the row numbers.
    vocab_size: token ids must be below it; by default the tokenizer's, if there is one.
    tokenizer: the Hugging Face tokenizer the ids belong to; an engine with another one refuses the index.
    attributes: a pyarrow Table, or columns by name, with one row for each item given, also for equal ones.
    Raises ItemSetError as `rows.as_rows`, `keys.as_keys`, `attributes.as_attributes` and `trie.build_trie` do.
    """
    vocab_size = len(tokenizer) if vocab_size is None and tokenizer is not None else vocab_size
    if tokenizer is not None and not hasattr(items, "ndim") and not isinstance(items, Rows):
        items = items if isinstance(items, list) else list(items)
        if items and isinstance(items[0], list | tuple) and items[0] and isinstance(items[0][0], str):
            items = Rows(*encode_pieces(items, tokenizer))
    if not isinstance(prefix, str) or escape not in (None, *get_args(Escape)):
        raise ItemSetError(f"prefix must be a text and escape json or text, not {shown(prefix)} and {shown(escape)}")
    given = as_rows(items, vocab_size)
    item_keys = None if keys is None else as_keys(keys, len(given))
    columns = None if attributes is None else attribute_columns.as_attributes(attributes, len(given))
    distinct = sort_unique(given)
    del given
    origin = Origin(vocab_size and int(vocab_size), None if tokenizer is None else identify(tokenizer), prefix, escape)
    return built(distinct, item_keys, columns, origin)


def built(distinct: Distinct, keys: pa.Array | None, attributes: pa.Table | None, origin: Origin) -> ItemSet:
    """Return the set of these rows. keys, attributes: in the order of the input; by default the places are the keys."""
    trie, members = build_trie(distinct.rows, distinct.lcp)
    places, key_starts = in_item_order(members, distinct.starts)
    at = pa.array(places)
    if distinct.order is not None:
        at = pa.array(distinct.order).take(at)  # in half the time that NumPy takes
    values = at.cast(pa.int64()) if keys is None else keys.take(at)
    section = None if attributes is None else attribute_columns.to_section(attributes, at.to_numpy())
    return ItemSet(trie, Keys(values, key_starts), origin, duplicates=len(places) - trie.items, attributes=section)


def build_text(
    texts: Iterable[str], tokenizer: Any, *, keys: KeyList | None = None, prefix: str = "",
    escape: Escape | None = None, attributes: Any = None,
) -> ItemSet:  # fmt: skip
    """Build the set of these texts, each as the one token sequence that `tokenizer` gives for `prefix` and the text.

    tokenizer: the model's own. keys, attributes: as for `build`. escape: "json" for items inside JSON strings, "text"
    inside other texts. Raises ItemSetError as `build` and `text.encode` do.
    """
    lossy = Lossy()
    rows = Rows(*encode(texts, tokenizer, prefix=prefix, escape=escape, lossy=lossy))
    lossy.warn()
    return build(rows, keys=keys, tokenizer=tokenizer, prefix=prefix, escape=escape, attributes=attributes)
