"""The place of each item of an answer in its JSON."""

import json
import re

_JSON = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")


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
    key = "" if key is None else key
    return f".{key}" if _NAME.fullmatch(str(key)) else f"[{json.dumps(key, ensure_ascii=False)}]"
