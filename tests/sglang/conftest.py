"""Fixtures of the tests with real SGLang engines and servers, which need its own virtual environment."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from pools import Pool
from sets import named_options

try:
    distribution("sglang")
except PackageNotFoundError:
    collect_ignore_glob = ["*"]
else:
    HERE = Path(__file__).parent
    sys.path[:0] = [str(HERE), str(HERE / "cpu")]
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TESTS_SGLANG_REPORTS": "1"}
    runpy.run_path(str(HERE / "cpu" / "sitecustomize.py"))  # the engines' processes have it on PYTHONPATH

PATHS = ["device", "host"]


# With the scope of a module, pytest runs all of a module's tests on one path before it turns to the other.
@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Where masks are computed."""
    return request.param


@pytest.fixture(scope="session")
def engines() -> Iterator[Pool[Any]]:
    from sglang_engines import Engine

    pool = Pool(Engine, keep=2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[Pool[Any]]:
    from sglang_servers import Server

    pool = Pool(Server, keep=1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def files(named_sets: dict[str, Any]) -> dict[str, Any]:
    """The options that register the item sets of the tests."""
    return named_options(named_sets)


@pytest.fixture(scope="session")
def static(engines: Pool[Any], tiny_model: Path, files: dict[str, Any]) -> Callable[..., Any]:
    """`static(path, **arguments)`: an engine with our backend and these sets."""

    def start(path: str, **arguments: Any) -> Any:
        return engines(tiny_model, grammar_backend="static", **files, item_set_path=path, **arguments)

    return start


@pytest.fixture
def engine(static: Callable[..., Any], path: str) -> Any:
    return static(path)
