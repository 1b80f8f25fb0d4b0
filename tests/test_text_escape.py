"""Items that stand inside longer texts: their tokens there, and what a set, a file and the command keep of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from holes import FILMS
from real_tokenizers import NAMES, tokenizer

import itemset
from itemset import ItemSetError, build_external, cli
from itemset.select.views import view
from itemset.text import continues, encode, escaped


def rows(texts: list[str], name: str, **options: Any) -> list[list[int]]:
    tokens, offsets = encode(texts, tokenizer(name), **options)
    return [part.tolist() for part in np.split(tokens, offsets[1:-1])]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefix", ["", " ", 'a "'])
@pytest.mark.parametrize("escape", ["json", "text"])
def test_tokens_in_the_middle_of_a_text(name: str, prefix: str, escape: Any) -> None:
    """They are what a tokenizer gives after a line, and decode to the escaped text."""
    own, found = tokenizer(name), rows(FILMS, name, prefix=prefix, escape=escape)
    line = own.encode("\n", add_special_tokens=False)
    for text, tokens in zip(FILMS, found, strict=True):
        there = json.dumps(prefix + text, ensure_ascii=False)[1:-1] if escape == "json" else prefix + text
        assert there == escaped(prefix + text, escape)
        if name == "llama":
            assert own.encode("\n" + there, add_special_tokens=False) == line + tokens
        else:
            assert own.encode(there, add_special_tokens=False) == tokens
        assert own.decode([*line, *tokens]).removeprefix(own.decode(line)) == there


def test_which_tokenizers_go_on() -> None:
    assert [continues(tokenizer(name)) for name in NAMES] == [True, True, False]
    assert rows(["Alien"], "llama") != rows(["Alien"], "llama", escape="text")
    for name in ("tiny", "tekken"):
        assert rows(FILMS, name) == rows(FILMS, name, escape="text")


class Joining:
    """A tokenizer that marks words as SentencePiece does, and has a token for a line with an `x` after it."""

    def __init__(self) -> None:
        self._own = tokenizer("llama")
        self._line = self._own("\n", add_special_tokens=False)["input_ids"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
        joined = [[7] if text.startswith("\nxy") else None for text in texts]
        ids = self._own(texts, **options)["input_ids"]
        return {"input_ids": [one or other for one, other in zip(joined, ids, strict=True)]}


def test_refuses_what_has_no_tokens_of_its_own() -> None:
    with pytest.raises(ItemSetError, match=r"item 1 \('xyz'\) has other tokens after '\\n' than alone"):
        encode(["Alien", "xyz"], Joining(), escape="text")
    with pytest.raises(ItemSetError, match="escape must be json, text or space, not 'xml'"):
        encode(["Alien"], tokenizer("tiny"), escape="xml")  # type: ignore[arg-type]
    with pytest.raises(ItemSetError, match=r"item 1 \(''\) is empty"):
        encode(["Alien", ""], tokenizer("llama"), escape="json")
    with pytest.raises(ItemSetError, match="half of a surrogate pair"):
        encode(["\ud800"], tokenizer("llama"), escape="json")
    with pytest.raises(ItemSetError, match=r"end-of-sequence token '</s>'"):
        encode(["a", "b</s>"], tokenizer("llama"), escape="text")


@pytest.mark.parametrize("name", NAMES)
def test_a_set_keeps_it(name: str, tmp_path: Path) -> None:
    """Saved, updated, as views, on the way to another process, and asked for texts as they are."""
    own, path = tokenizer(name), tmp_path / "films.itemset"
    films = itemset.build_text(FILMS, own, prefix=" ", escape="json", attributes={"n": range(len(FILMS))})
    assert films.escape == "json"
    films.save(path)
    saved = itemset.load(path)
    for one in (
        saved,
        itemset.from_bytes(films.to_bytes()),
        view(films, {"n": {"$lt": 9}}),
        view(films, only_keys=[3]),
    ):
        assert one.escape == "json"
    assert list(saved.lookup_text(FILMS, own)) == list(range(len(FILMS)))
    new = 'A "new" film\\'
    after = saved.updated([new], tokenizer=own, keys=[1000], attributes={"n": [0]}, remove=[0])
    whole = itemset.build_text(
        [*FILMS[1:], new],
        own,
        prefix=" ",
        escape="json",
        keys=[*range(1, len(FILMS)), 1000],
        attributes={"n": [*range(1, len(FILMS)), 0]},
    )
    assert after.to_bytes() == whole.to_bytes()
    assert itemset.build_text(FILMS, own).escape is None


@pytest.mark.parametrize("name", ["tekken", "llama"])
@pytest.mark.slow
def test_the_command_and_builds_on_disk(name: str, tmp_path: Path, capsys: Any) -> None:
    own, source = tokenizer(name), tmp_path / "films.jsonl"
    own.save_pretrained(tmp_path / "tokenizer")
    source.write_text("".join(json.dumps({"title": text, "key": i}) + "\n" for i, text in enumerate(FILMS)))
    output, direct = tmp_path / "films.itemset", itemset.build_text(FILMS, own, escape="json")
    build = ["build", str(source), "--column", "title", "--key", "key", "--tokenizer", str(tmp_path / "tokenizer")]
    assert cli.main([*build, "--escape", "json", "-o", str(output)]) == 0
    opened = itemset.load(output)
    assert (opened.escape, opened.digest) == ("json", direct.digest)
    external = build_external(source, column="title", key="key", tokenizer=own, escape="json")
    assert (external.escape, external.digest) == ("json", direct.digest)

    new, quoted = tmp_path / "new.jsonl", 'The "other" one'
    new.write_text(json.dumps({"title": quoted, "key": 99}))
    update = ["update", str(output), "--add", str(new), "--column", "title", "--key", "key"]
    assert cli.main([*update, "--tokenizer", str(tmp_path / "tokenizer"), "-o", str(output)]) == 0
    assert itemset.load(output).lookup_text([quoted], own).tolist() == [99]
    capsys.readouterr()
    lookup = ["lookup", str(output), "--tokenizer", str(tmp_path / "tokenizer"), "--text", quoted]
    assert cli.main(lookup) == 0
    assert capsys.readouterr().out.startswith("99\t")
    assert cli.main(["info", str(output)]) == 0
    assert "escape       json" in capsys.readouterr().out

    ids = tmp_path / "ids.npy"
    np.save(ids, np.array([[3, 4]]))
    assert cli.main(["build", str(ids), "--escape", "json", "-o", str(output)]) == 1
    assert "--escape" in capsys.readouterr().err
