"""Fixtures for every test module: tiny models, and real engines and servers, started when first asked for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import devices  # noqa: F401  prepares Triton before anything imports it
import further  # noqa: F401  what engines in this process are given
import pytest
from engines import Engine, backend
from hypothesis import settings
from models import cached_tiny_llama
from pools import Pool
from servers import Server
from sets import NamedSet, named_options, token_sets

TESTS_OF = ("draft", "engine", "inside", "live", "ranking", "refusal", "server", "weight")  # one body for both engines
pytest.register_assert_rewrite("live", *(f"{subject}_tests" for subject in TESTS_OF))

# Where Python is told to write no bytecode, every engine would compile our sources again as it starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The same examples in every run of the same code. `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("explore", deadline=None, derandomize=False)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

IMPORTS_AN_ENGINE = ("test_vllm_*.py", "test_examples.py", "test_gpu_script.py", "test_trl.py")

LONGEST = (
    "test_vllm_draft_models.py", "test_gpu_code.py", "test_package.py", "test_gpu_script.py", "test_vllm_compat.py",
    "test_text_escape.py", "test_vllm_engine.py", "test_fuzz.py", "test_vllm_wide_lists.py", "test_vllm_thoughts.py",
    "test_vllm_beam_attention.py", "test_vllm_windows.py", "test_vllm_states.py", "test_vllm_images.py",
    "test_vllm_list_steps.py",
    "test_vllm_live.py", "test_vllm_weights.py", "test_vllm_server.py", "test_examples.py",
    "test_vllm_inside.py", "test_vllm_drafts.py", "test_ranking_kernels.py", "test_vllm_ranking.py",
    "test_vllm_device.py", "test_kernels.py", "test_vllm_passes.py", "test_published.py", "test_vllm_wide_draws.py",
    "test_vllm_plugins.py", "test_beam_draws.py", "test_vllm_environment.py", "test_vllm_deployment.py",
    "test_vllm_features.py", "test_update.py", "test_loops.py", "test_sglang_speculation.py",
    "test_sglang_wide_lists.py", "test_sglang_live.py", "test_sglang_server.py", "test_sglang_weights.py",
    "test_sglang_engine.py", "test_sglang_draft_models.py", "test_sglang_inside.py", "test_sglang_ranks.py",
    "test_sglang_compat.py", "test_sglang_device.py", "test_sglang_adapters.py",
)  # fmt: skip
"""Modules that begin first, so that neither of two workers has a long one left when the other has none. While the first
one compiles with Numba what almost all modules run, those after it do without."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="omit the modules that import an engine, and what is slow")


def pytest_report_header() -> str:
    """Which packages the tests run with: those of the lock, or what differs from it."""
    locks = Path(__file__).parents[1] / "locks"
    here = {re.sub(r"[-_.]+", "-", one.name).lower(): one.version.partition("+")[0] for one in distributions()}
    lock = locks / ("sglang-cpu.txt" if "sglang" in here else "vllm-cpu.txt")
    named = [line.split("==") for line in lock.read_text().splitlines() if not line.startswith("#")]
    found = [(name, locked, here.get(re.sub(r"[-_.]+", "-", name).lower())) for name, locked in named]
    others = [f"{name} {version or 'missing'}" for name, locked, version in found if version != locked]
    listed = ", ".join(others[:20]) + (" ..." if len(others) > 20 else "")
    return f"packages: not those of {lock.name}: {listed}" if others else f"packages: all {len(named)} of {lock.name}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Not even imported: importing vLLM takes seconds, also by way of TRL."""
    return True if config.getoption("--quick") and any(map(collection_path.match, IMPORTS_AN_ENGINE)) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


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
    return backend(**named_options(named_sets))
