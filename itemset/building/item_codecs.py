"""Items as columns that sort as the items do."""

from functools import partial

import numpy as np
import pyarrow as pa

from itemset.trie.pointers import compiled
from itemset.trie.rows import Rows, pack_keys, token_dtype

_MAX_WORDS = 64  # columns of an item; longer items are sorted as bytes


class _Words:
    """Integers of 64 bits. A token is stored as its id plus one, the first highest; 0 follows the last."""

    def __init__(self, highest: int, longest: int, width: int) -> None:
        self._bits = (highest + 1).bit_length()
        self._tokens = 64 // self._bits  # in a word
        self._dtype, self._longest, self._width = token_dtype(highest), longest, width
        self.fields = [(f"word{i}", pa.uint64()) for i in range(-(-longest // self._tokens))]

    def encode(self, rows: Rows) -> list[pa.Array]:
        members, starts = np.arange(len(rows), dtype=np.uint32), range(0, self._longest, self._tokens)
        pack = partial(pack_keys, *rows.cells, members)
        return [pa.array(pack(start, self._tokens, self._bits, 0)) for start in starts]

    def decode(self, batch: pa.RecordBatch) -> Rows:
        words = np.stack([batch.column(name).to_numpy() for name, _ in self.fields])
        tokens = np.empty(len(batch) * self._longest, self._dtype)
        offsets = np.zeros(len(batch) + 1, np.int64)
        _unpack(words, self._tokens, self._bits, tokens, offsets)
        return Rows(tokens, width=self._width) if self._width else Rows(tokens[: offsets[-1]], offsets)


class _Bytes:
    """A string of bytes: the token ids in big-endian order."""

    def __init__(self, highest: int) -> None:
        self.fields = [("bytes", pa.large_binary())]
        self._dtype = np.dtype(token_dtype(highest))

    def encode(self, rows: Rows) -> list[pa.Array]:
        text = pa.py_buffer(rows.tokens.astype(self._dtype.newbyteorder(">")))
        offsets = pa.py_buffer(rows.offsets * self._dtype.itemsize)
        return [pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(rows), [None, offsets, text])]

    def decode(self, batch: pa.RecordBatch) -> Rows:
        strings = batch.column("bytes").cast(pa.large_binary())
        _, offsets, text = strings.buffers()
        offsets = np.frombuffer(offsets, np.int64, len(strings) + 1, strings.offset * 8)
        tokens = np.frombuffer(text, np.uint8)[offsets[0] : offsets[-1]].view(self._dtype.newbyteorder(">"))
        return Rows(tokens.astype(self._dtype), (offsets - offsets[0]) // self._dtype.itemsize)


def codec_of(highest: int, longest: int, width: int) -> _Words | _Bytes:
    """Return the codec for items with token ids up to `highest` and up to `longest` tokens; width: as for `Rows`."""
    words = _Words(highest, longest, width)
    return words if len(words.fields) <= _MAX_WORDS else _Bytes(highest)


@compiled
def _unpack(words, count, bits, tokens, offsets):  # type: ignore[no-untyped-def]
    """Fill tokens and offsets (from 1 on) with what `pack_keys` has packed: words [words, rows]."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    at = 0
    for i in range(words.shape[1]):
        for word in range(words.shape[0]):
            for k in range(count - 1, -1, -1):
                token = (words[word, i] >> np.uint64(bits * k)) & mask
                if token:
                    tokens[at] = token - np.uint64(1)
                    at += 1
        offsets[i + 1] = at
