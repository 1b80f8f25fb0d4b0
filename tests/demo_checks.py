"""The demo's questions, asked of a server of the tests: what `bootstrap.py demo` ends with, whichever engine it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import films
import inside

TITLE_OF = {number: f"The {word} river ({1960 + number})" for number, word in enumerate("ABCDEFGHIJKL", 1)}


def source(folder: Path) -> str:
    """The file of items, with its options, that such a server must have as `films`."""
    path = folder / "films.csv"
    rows = (f"{key},{title},{1960 + key},{'DE' if key % 2 else 'FR'},true\n" for key, title in TITLE_OF.items())
    path.write_text("movie_id,title,year,region,in_stock\n" + "".join(rows))
    return f"{path}?column=title&key=movie_id&attribute=year&attribute=region&attribute=in_stock"


def check(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (films, inside):
        monkeypatch.setattr(module, "MODEL_NAME", server.model_name)
    assert films.questions(f"{server.url}/v1", TITLE_OF)
