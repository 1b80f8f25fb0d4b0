"""Damaged and lying index files: refused with the file's name, or read without a crash, a hang or a wild access."""

from __future__ import annotations

import random
import shutil
import zlib
from pathlib import Path

import pytest
from mutations import File, mutate, run, shapes

import itemset

SEED = 20


@pytest.mark.slow
def test_two_thousand_mutations() -> None:
    tally = run(SEED, 0, 2_000)
    assert not tally.failures, "\n\n".join(tally.failures[:5])
    assert tally.outcomes.total() == 2_000
    ends = {outcome for _, outcome in tally.outcomes}
    assert {"refused, unchecked refused", "refused, unchecked answers", "answers, unchecked answers"} <= ends


@pytest.mark.slow
def test_no_access_outside_an_array(pytestconfig: pytest.Config) -> None:
    """The same with compiled code that checks every index. Compiling takes seconds, so it is kept while no source
    changes: Numba itself would not notice where one file's function is compiled into another's."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(itemset.__file__).parent.rglob("*.py")))
    cache = pytestconfig.cache.mkdir("numba-boundscheck")  # type: ignore[union-attr]
    current = cache / f"{zlib.crc32(sources):08x}"
    for old in {*cache.iterdir()} - {current}:
        shutil.rmtree(old)
    tally = run(SEED + 1, 0, 200, ["one", "ragged", "fixed"], cache=current)
    assert not tally.failures, "\n\n".join(tally.failures[:5])
    assert tally.outcomes.total() == 200


def test_mutations_are_repeatable_and_files_are_put_together_as_they_were() -> None:
    for s in shapes().values():
        data = s.to_bytes()
        assert mutate(data, random.Random("5/6")) == mutate(data, random.Random("5/6"))
        again = File(File(data).seal())
        assert again.payload == File(data).payload
        for section in again.header["sections"]:
            assert (again.array(section) == File(data).array(File(data).section(section["name"]))).all()
