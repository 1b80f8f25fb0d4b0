"""Fixtures for every test module: tiny models, and real engines and servers, started when first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices  # noqa: F401  prepares Triton before anything imports it
import pytest
from engines import Engine
from models import cached_tiny_llama
from pools import Pool
from servers import Server
from sets import NamedSet, token_sets


# With the scope of a module, pytest runs all of a module's tests on one runner before it turns to the other.
@pytest.fixture(scope="module", params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> str:
    """The model runner: vLLM's old one, or the new one with its Triton kernels in Triton's interpreter."""
    return request.param


WAYS = {"v1-host": ("v1", "host"), "v2-host": ("v2", "host"), "v2-device": ("v2", "device")}


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS.keys())
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A model runner and where its masks are computed."""
    return request.param


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A random Llama with a vocabulary of 2112, of which the tokenizer knows the first few hundred."""
    return cached_tiny_llama()


@pytest.fixture(scope="session")
def odd_model() -> Path:
    """The same with a vocabulary that is not a multiple of 32, so that a bitmask's last word is not full."""
    return cached_tiny_llama(vocab_size=1013)


@pytest.fixture(scope="session")
def engines() -> Iterator[Pool[Engine]]:
    """`engines(runner, model, **llm_arguments)`: an `Engine`, shared by all tests that ask for the same."""
    pool = Pool(Engine, keep=2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[Pool[Server]]:
    """`servers(runner, model, **flags)`: a `Server`, shared by tests that ask for the same one after another."""
    pool = Pool(Server, keep=1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def named_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NamedSet]:
    """Item sets of several shapes by name, each with its file."""
    return token_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="session")
def static(named_sets: dict[str, NamedSet]) -> dict[str, Any]:
    """The arguments of an engine with our backend and these sets."""
    return {
        "structured_outputs_config": {"backend": "static"},
        "additional_config": {"item_sets": {name: named.path for name, named in named_sets.items()}},
    }
