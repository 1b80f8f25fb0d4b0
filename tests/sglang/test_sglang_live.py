"""Published sets that change while the real SGLang serves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from live import OPTIONS, Films, Served, broken, check_versions
from live_tests import *  # noqa: F403 - its tests, with the server of this module

from sglang_static.compat import VARIABLE


def options(folder: Path, path: str, **more: Any) -> dict[str, Any]:
    return {**OPTIONS, "item_set_cache": str(folder / "cache"), "item_set_path": path, **more}


@pytest.fixture(scope="module")
def served(servers, tiny_model, tmp_path_factory):
    """On the device path. `test_offline` asks the same of the host path."""
    folder = tmp_path_factory.mktemp("live")
    films = Films(folder / "sets" / "films")
    Films(folder / "sets" / "other", seed=1)
    broken(folder / "sets" / "broken")
    flags = ("--item-set-dir", str(folder / "sets"), "--item-set", f"films={films.folder}")
    env = {VARIABLE: json.dumps(options(folder, "device"))}
    server = servers(tiny_model, arguments=("--grammar-backend", "static", *flags), env=env)
    return Served(server, folder, films)


def test_offline(engines, tiny_model, tmp_path, path):
    films = Films(tmp_path / "sets" / "films")
    given = options(tmp_path, path, item_sets={"films": str(films.folder)})
    engine = engines(tiny_model, grammar_backend="static", **given)
    assert engine.call(refreshed) == films.versions[0].name
    check_versions(engine, films, refreshed)


def test_two_ranks_that_share_requests(engines, tiny_model, tmp_path):
    films = Films(tmp_path / "sets" / "films")
    given = options(tmp_path, "device", item_sets={"films": str(films.folder)})
    # SGLang gives each rank a NUMA node of its own by default, and ends if there are too few.
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    engine = engines(tiny_model, grammar_backend="static", **given, dp_size=2, env=cores)
    check_versions(engine, films, refreshed)


def refreshed(engine: Any) -> str:
    import sglang_static

    (entry,) = sglang_static.refresh(engine, "films")
    return entry["version"]
