"""Grammars as xgrammar prints them: put right, and with long alternations of texts taken out, to become item sets."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import xgrammar

from itemset.embedded.holes import HOLES
from itemset.embedded.placement import EBNF, JSON, SLATE
from itemset.errors import ItemSetError

_MADE_FROM = {JSON: "json_schema", SLATE: EBNF}  # in the names of xgrammar's functions; other kinds as they are

_LITERAL, _CLASS = r'"(?:[^"\\]|\\.)*+"', r"\[(?:[^\]\\]|\\.)*+\]"
_TEXT = rf'\({_LITERAL}(?: {_LITERAL})*+\)|""'
_OTHER = rf'\((?:{_LITERAL}|{_CLASS}|[^"\[()]++)*+\)'
_OPTION, _OPTIONS = re.compile(f"({_TEXT})|({_OTHER})"), re.compile(rf"(?:(?:{_TEXT}|{_OTHER})(?: \| |\)$))*+")
_BEGIN = re.compile(r"([\w.-]+) ::= ")
_INSIDE = re.compile(r'"((?:[^"\\]|\\.)*+)"')
_ELEMENT = re.compile(rf"{_LITERAL}|{_CLASS}|[\w.-]+|[({{]")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))")
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}
_ABOVE = 50  # rules above one, which are looked at for circles
_NUL = re.compile(r"\0|(?<!\\)(?:\\\\)*\\(?:u0000|x00|0|U00000000)")  # as it is, or escaped
_PRINTED = re.compile(r"\\x([0-9a-f]{2})|\\.")


def printed(kind: str, spec: str, options: Mapping[str, Any]) -> str:
    """Return xgrammar's grammar of a constraint, as EBNF that it reads as what it is. Raises as xgrammar does, and
    ItemSetError for NUL in what is no JSON schema: it ends a text that xgrammar prints.

    kind: of `placement`; a slate is stated as EBNF. options: of `xgrammar.Grammar.from_json_schema`.
    xgrammar writes é as `\\xe9`, but takes all hexadecimal digits that follow for a part of it: "Québec" would be lost.
    """
    if kind != JSON and _NUL.search(spec):
        raise ItemSetError(f"{kind} holds the character NUL (\\u0000), which grammars with sets lose: leave it out")
    make = getattr(xgrammar.Grammar, f"from_{_MADE_FROM.get(kind, kind)}")
    text = str(make(spec, **options) if kind == JSON else make(spec))
    if r"\x" not in text:
        return text
    return _PRINTED.sub(lambda found: rf"\u00{found[1]}" if found[1] else found[0], text)


class Texts(NamedTuple):
    """A long alternation that was taken out of a grammar."""

    texts: list[str]  # distinct
    closers: bytes  # what may come right after one of them, as far as that is known


class _Rule(NamedTuple):
    line: int
    name: str
    texts: dict[str, str]  # of its options, those that are nothing but text, and how they are written
    others: list[str]


def long_alternations(grammar: str, least: int, first: int, most: int = HOLES) -> tuple[str, list[Texts]]:
    """Return a grammar with tokens `first + k` in the places of its alternations of more than `least` texts, and these.

    grammar: as `printed`. most: how many are taken. Strings of JSON keep their quotes: what stands between them is
    taken out. Other texts stay in the grammar where what comes before them is not known or ends in a space, which
    belongs to a text's first token, and in rules that hold themselves.
    """
    lines, found = grammar.split("\n"), list[Texts]()
    rules = [
        rule for i, line in enumerate(lines) if line.count(" | ") >= least and (rule := _read(i, line)) is not None
    ]
    around = _Around(lines, {rule.line for rule in rules if not rule.others})
    for rule in sorted(rules, key=lambda rule: -len(rule.texts)):
        options = list(rule.others)
        for quoted in (True, False):
            texts = [text for text in rule.texts if (len(text) > 2 and text[0] == text[-1] == '"') == quoted]
            wanted = len(texts) > least and len(found) < most
            before, after = ({'"'}, '"') if quoted else around.of(rule.name) if wanted else (set[str](), "")
            if wanted and " " not in before:
                token, options = f"Token({first + len(found)})", options + ['""'] * ("" in texts)
                options.append(f'("\\"" {token} "\\"")' if quoted else f"({token})")
                inside = [text[1:-1] if quoted else text for text in texts if text]
                found.append(Texts(inside, after.encode("utf-8", "ignore")))
            else:
                options += map(rule.texts.__getitem__, texts)
        lines[rule.line] = f"{rule.name} ::= ({' | '.join(options)})"
    return "\n".join(lines), found


def _read(number: int, line: str) -> _Rule | None:
    """Return a rule that is an alternation; None for one that has brackets within, or asks for what follows it."""
    name, _, body = line.partition(" ::= (")
    if _OPTIONS.fullmatch(body) is None:  # first, as to look for options elsewhere in a line could take the square
        return None
    options = _OPTION.findall(body)
    texts = {_text(text): text for text, _ in options if text}
    return _Rule(number, name, texts, [other for _, other in options if other])


def _text(literals: str) -> str:
    text = "".join(_INSIDE.findall(literals))
    if "\\" not in text:
        return text
    return _ESCAPE.sub(_character, text).encode("utf-16", "surrogatepass").decode("utf-16")


def _character(escape: re.Match[str]) -> str:
    return _SIMPLE.get(escape[4], escape[4]) if escape[4] else chr(int(escape[1] or escape[2] or escape[3], 16))


class _Around:
    """What stands before and after the rules of a grammar, wherever these are named."""

    def __init__(self, lines: list[str], omitted: set[int]) -> None:
        """omitted: lines that need not be read, as no rule is named in them."""
        self._named: dict[str, list[tuple[str, str, str]]] = defaultdict(list)  # the rule it is in, before, after
        name = ""
        for number, line in enumerate(lines):
            begin = _BEGIN.match(line)  # none where what tags trigger takes several lines
            name, at = (name, 0) if begin is None else (begin[1], begin.end())
            elements = [] if number in omitted else ["", *_ELEMENT.findall(line, at), ""]
            for before, element, after in zip(elements, elements[1:], elements[2:], strict=False):
                if element[0] not in '"[({':
                    self._named[element].append((name, before, after))

    def of(self, rule: str) -> tuple[set[str], str]:
        """Return the characters that may come right before a rule, "" where an answer begins and " " where that is not
        known or may be the rule itself, and those with which texts begin that come right after it."""
        after = {_text(after)[:1] for _, _, after in self._named[rule]}
        above = self._above(rule)
        if len(above) > _ABOVE or rule in above or any(one in self._above(one) for one in above):
            return {" "}, ""  # it may have ever more readings
        return set(self._before(rule, set())), "".join(after)

    def _above(self, rule: str) -> set[str]:
        """Return the rules in which a rule stands, and those in which these stand."""
        above, waiting = set[str](), [rule]
        while waiting:
            new = {within for within, _, _ in self._named[waiting.pop()]} - above
            above |= new
            waiting += new
        return above

    def _before(self, rule: str, seen: set[str]) -> Iterator[str]:
        if rule in seen:
            return
        seen.add(rule)
        if rule == "root":
            yield ""
        for within, before, after in self._named[rule]:
            if before == "(" and after != "{":
                yield from self._before(within, seen)
            else:  # what is repeated stands before itself
                yield (after != "{" and _text(before)[-1:]) or " "
