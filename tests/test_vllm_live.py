"""Published sets that change while the real vLLM serves them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engines import backend
from live import OPTIONS, Films, Served, broken, check_versions
from live_tests import *  # noqa: F403 - its tests, with the server of this module
from live_tests import bad
from servers import wait_for

from itemset import published

PATHS = {"v1": "host", "v2": "device"}


def start(servers: Any, runner: str, model: Path, folder: Path, *arguments: str, **options: Any) -> Served:
    films = Films(folder / "sets" / "films")
    Films(folder / "sets" / "other", seed=1)
    broken(folder / "sets" / "broken")
    given = {**OPTIONS, "item_set_cache": str(folder / "cache"), "item_set_path": PATHS[runner], **options}
    flags = ("--guided-decoding-backend", "static", "--additional-config", json.dumps(given), *arguments)
    return Served(servers(runner, model, arguments=flags), folder, films)


@pytest.fixture(scope="module")
def served(servers, tiny_model, tmp_path_factory):
    """On the device path. `test_offline` asks the same of the host path."""
    folder = tmp_path_factory.mktemp("live")
    flags = ("--item-set-dir", str(folder / "sets"), "--item-set", f"films={folder / 'sets' / 'films'}")
    return start(servers, "v2", tiny_model, folder, *flags)


def test_an_answer_is_the_item_that_it_names(served):
    films, version = served.films, served.take_up()
    choice = served.choice(return_token_ids=True)
    tokens = [token for token in choice["token_ids"] if token != 1]
    assert films.check_tokens(choice["item"], tokens) == version.name


def test_versions_are_counted(served):
    refused = published.publish(bad(served), served.films.folder)
    assert served.server.post("/v1/item_sets/films/refresh", {})[0] == 409
    assert refused.name not in str(served.metrics())
    version = served.take_up()
    values = dict(line.rsplit(" ", 1) for line in served.metrics())
    assert float(values['item_set:refused_versions_total{item_set="films"}']) >= 1
    assert float(values['item_set:refused_versions_total{item_set="broken"}']) == 1
    assert float(values['item_set:refreshes_total{item_set="films"}']) >= 1
    assert f'item_set:version{{item_set="films",version="{version.name}"}}' in values


def test_offline(engines, tiny_model, tmp_path, runner):
    """An `LLM` takes a version up when it is told to."""
    films = Films(tmp_path / "sets" / "films")
    engine = engines(runner, tiny_model, **backend(**films.options, item_set_path=PATHS[runner]))
    assert engine.call(refreshed) == films.versions[0].name
    check_versions(engine, films, refreshed)


def refreshed(llm: Any, name: str | None = None) -> str:
    import vllm_static

    (entry,) = vllm_static.refresh(llm, name)
    return entry["version"]


def test_two_ranks(engines, tiny_model, tmp_path):
    films = Films(tmp_path / "sets" / "films")
    engine = engines(
        "v2",
        tiny_model,
        **backend(**films.options, item_set_path="device"),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        timeout=300,
    )
    check_versions(engine, films, partial(refreshed, name="films"))
    engine.close()


def test_two_api_servers(servers, tiny_model, tmp_path):
    """Whichever API server answers, soon after a refresh of any."""
    given = {**OPTIONS, "item_set_cache": str(tmp_path / "cache")}
    films = Films(tmp_path / "sets" / "films")
    flags = ("--guided-decoding-backend", "static", "--item-set", f"films={films.folder}", "--api-server-count", "2")
    arguments = (*flags, "--additional-config", json.dumps(given))
    served = Served(servers("v2", tiny_model, arguments=arguments, timeout=400), tmp_path, films)
    for _ in range(4):
        version = served.take_up()
        wait_for(lambda version=version: {films.check(served.choice()["item"]) for _ in range(8)} == {version.name})
