"""The demo's questions, asked of a server of the tests: what `bootstrap.py demo` ends with, whichever engine it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import itemset

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import films
import inside

TITLE_OF = {number: f"The {word} river ({1960 + number})" for number, word in enumerate("ABCDEFGHIJKL", 1)}
EOS = 1


def built(folder: Path, tokenizer: Any) -> Path:
    """The index of the set that such a server must have as `films`."""
    path = folder / "films.itemset"
    itemset.build_text([*TITLE_OF.values()], tokenizer, keys=[*TITLE_OF]).save(path)
    return path


def check(server: Any, engine: str, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (films, inside):
        monkeypatch.setattr(module, "MODEL_NAME", server.model_name)
    assert films.questions(f"{server.url}/v1", engine, Path(index), TITLE_OF, EOS)
