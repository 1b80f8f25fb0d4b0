"""Which items of a set a prompt holds: by its tokens, or by its text, word by word, without case and punctuation."""

import re
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.trie.keys import Keys
from itemset.trie.pointers import compiled
from itemset.trie.rows import as_rows
from itemset.trie.walk import DEAD, advance, is_terminal

# Scripts without spaces between words: each character is one. Thai, Lao, Burmese, Khmer, Japanese and Chinese.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
MOST_WORDS = 50_000  # of a prompt: each begins as many windows as items have lengths


class _Compared(dict[int, str]):
    """What stands for each character where texts are compared: letters, numbers, and marks such as vowel signs."""

    def __missing__(self, code: int) -> str:
        text = chr(code)
        kept = unicodedata.category(text)[0] in "LMN"
        made = " " if not kept else f" {text} " if _UNSPACED.match(text) else text
        if code < 1 << 16:  # of the others, there are too many to keep
            self[code] = made
        return made


_COMPARED = _Compared()


def in_tokens(item_set: ItemSet, tokens: Sequence[int]) -> NDArray[np.int64]:
    """Return the numbers of the items whose tokens stand in these, one after another, inside of others too."""
    spans = _spans(item_set.trie.tables.pointers, np.array(tokens, np.int64))
    found = {tuple(tokens[begin:end]) for begin, end in spans}
    return item_set._numbers_of(as_rows(list(found))) if found else np.zeros(0, np.int64)


@compiled
def _spans(tables, tokens):  # type: ignore[no-untyped-def]
    spans = [(0, 0) for _ in range(0)]
    for begin in range(len(tokens)):
        state = np.int64(0)
        for end in range(begin, len(tokens)):
            state = advance(tables, state, tokens[end])
            if state == DEAD:
                break
            if is_terminal(tables, state):
                spans.append((begin, end + 1))
    return spans


def words_of(text: str) -> list[str]:
    """Return the words of a text as they are compared: of one case, without punctuation and spaces."""
    return unicodedata.normalize("NFKC", text).casefold().translate(_COMPARED).split()


class TextIndex:
    """Finds the items of a whole set in a text by a hash table of their words. One without any is not found."""

    def __init__(self, item_set: ItemSet, decode: Callable[[list[list[int]]], list[str]]) -> None:
        """decode: returns the text of each row of tokens. It takes 25 microseconds an item."""
        parts, prefix = list[pa.Array](), item_set.prefix
        before = len(words_of(prefix))
        self._counts = set[int]()
        some = 1 + len(item_set) // 1_000  # so that no other thread waits long
        for numbers in np.array_split(np.arange(len(item_set)), some):
            whole = decode(item_set.items_at(numbers))  # the tokenizer may have altered the prefix
            texts = [words_of(one.removeprefix(prefix))[0 if one.startswith(prefix) else before :] for one in whole]
            parts.append(pa.array(map(" ".join, texts), pa.large_string()))
            self._counts.update(map(len, texts))
        self._texts = Keys(pa.concat_arrays(parts))
        self.nbytes = self._texts.values.nbytes + self._texts._index.nbytes

    def numbers_in(self, text: str) -> NDArray[np.int64]:
        """Return the numbers of the items whose words stand in a text. Raises ItemSetError above MOST_WORDS."""
        words, found = words_of(text), [np.zeros(0, np.int64)]
        if len(words) > MOST_WORDS:
            raise ItemSetError(f"the prompt has {len(words):,} words, the limit is {MOST_WORDS:,}: send keys instead")
        for count in self._counts - {0}:
            windows = [" ".join(words[i : i + count]) for i in range(len(words) - count + 1)]
            found.append(self._texts.places_of(windows))
        return np.concatenate(found)
