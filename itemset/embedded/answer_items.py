"""The items of an answer: its tokens read again, and the place of each item in its JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from itemset.embedded.composite_grammar import Composite, Found
from itemset.embedded.vocabulary import Vocabulary

_JSON = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")


def items_of(composite: Composite, tokens: Sequence[int]) -> list[Found]:
    """Return the items of an answer, as far as its grammar takes it.

    composite: at the answer's beginning. tokens: the answer's, up to a stop token; more are ignored.
    """
    for token in tokens:
        if composite.is_terminated or not composite.accept(token):
            break
    return composite.found


def text_of(vocabulary: Vocabulary, tokens: Iterable[int]) -> bytes:
    """Return the text of these tokens, in bytes as `Found` counts them."""
    return b"".join(vocabulary.bytes[token] for token in tokens if 0 <= token < vocabulary.size)


def json_paths(text: bytes) -> dict[int, str]:
    """Return of each string in a JSON text, or in the beginning of one, its path: `$.films[0]`.

    By where its content begins, in bytes. Keys of objects have none.
    """
    found: dict[int, str] = {}
    above: list[list[str | int | None]] = []  # of each open object the key, of each array the place
    is_key = False
    for match in _JSON.finditer(text):
        token = match[0]
        if token in (b"{", b"["):
            above.append([None if token == b"{" else 0])
            is_key = token == b"{"
        elif token in (b"}", b"]"):
            if above:
                above.pop()
        elif token == b",":
            is_key = bool(above) and not isinstance(above[-1][0], int)
            if above and isinstance(place := above[-1][0], int):
                above[-1][0] = place + 1
        elif token == b":":
            is_key = False
        elif token.startswith(b'"'):
            if is_key:
                above[-1][0] = json.loads(token)
            else:
                found[match.start() + 1] = "$" + "".join(_step(one[0]) for one in above)
    return found


def _step(key: str | int | None) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    name = key or ""
    return f".{name}" if _NAME.fullmatch(name) else f"[{json.dumps(name, ensure_ascii=False)}]"
