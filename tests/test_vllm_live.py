"""Published sets that change while the real vLLM serves them."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from live import OPTIONS, Clients, Films, swaps
from servers import Server, wait_for

import itemset
from itemset import published

PATHS = {"v1": "host", "v2": "device"}


class Served:
    """A server, the folder of its sets, and what is asked of it."""

    def __init__(self, server: Server, folder: Path, films: Films) -> None:
        self.server, self.folder, self.films = server, folder, films

    def choice(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        asked = {"prompt": "p"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "p"}]}
        status, answer = self.server.post(
            path, {"model": "tiny", "item_set": "films", "max_tokens": 9, **asked, **body}
        )
        assert status == 200, answer
        return answer["choices"][0]

    def refresh(self, name: str = "films") -> dict[str, Any]:
        status, answer = self.server.post(f"/v1/item_sets/{name}/refresh", {})
        assert status == 200, answer
        return answer

    def listed(self, name: str = "films") -> dict[str, Any]:
        status, answer = self.server.get("/v1/item_sets")
        assert status == 200, answer
        return {one["name"]: one for one in answer["data"]}.get(name, {})

    def metrics(self) -> list[str]:
        return [line for line in self.server.get("/metrics")[1].splitlines() if line.startswith("item_set:")]


def start(servers: Any, runner: str, model: Path, folder: Path, *arguments: str, **options: Any) -> Served:
    films = Films(folder / "sets" / "films")
    Films(folder / "sets" / "other", seed=1)
    given = {**OPTIONS, "item_set_cache": str(folder / "cache"), "item_set_path": PATHS[runner], **options}
    flags = ("--guided-decoding-backend", "static", "--additional-config", json.dumps(given), *arguments)
    return Served(servers(runner, model, arguments=flags), folder, films)


@pytest.fixture(scope="module", params=["v1", "v2"])
def served(request, servers, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    flags = ("--item-set-dir", str(folder / "sets"), "--item-set", f"films={folder / 'sets' / 'films'}")
    return start(servers, request.param, tiny_model, folder, *flags)


def test_what_is_served_is_listed(served):
    entry = served.listed()
    assert entry["version"] == served.films.versions[-1].name
    assert (entry["items"], entry["views"], entry["followed"]) == (
        len(served.films.items[entry["version"]]),
        ["few"],
        True,
    )
    assert entry["path"] == ("host" if "host path" in served.server.log() else "device")
    assert served.listed("other")["version"]


def test_a_new_version_is_noticed(served):
    version = served.films.publish()
    wait_for(lambda: served.films.check(served.choice()["item"]) == version.name)
    assert served.listed()["previous_versions"] == [one.name for one in reversed(served.films.versions[:-1])]


def test_every_request_gets_the_new_version(served):
    films, version = served.films, served.films.publish()
    entry = served.refresh()
    assert (entry["version"], entry["items"]) == (version.name, version.items)
    keys = [*films.items[version.name]]
    answers = [
        served.choice(return_token_ids=True),
        served.choice("/v1/chat/completions"),
        served.choice(item_filter={"place": {"$gte": 10}}),
        served.choice(exclude_keys=keys[:20]),
        served.choice(only_keys=keys[:3]),
        served.choice(item_filter={"place": {"$lt": 40}}, exclude_keys=keys[5:10]),
    ]
    assert {films.check(choice["item"]) for choice in answers} == {version.name}
    tokens = [token for token in answers[0]["token_ids"] if token != 1]
    assert films.check_tokens(answers[0]["item"], tokens) == version.name
    assert films.check(served.choice(item_set="few")["item"], most=20) == version.name
    status, answer = served.server.post(
        "/v1/completions",
        {"model": "tiny", "prompt": "p", "item_set": "films", "use_beam_search": True, "n": 9, "max_tokens": 9},
    )
    assert status == 200, answer
    assert {films.check(choice["item"]) for choice in answer["choices"]} == {version.name}
    assert len({choice["item"]["key"] for choice in answer["choices"]}) == 9
    events = served.server.events(
        "/v1/completions", {"model": "tiny", "prompt": "p", "item_set": "films", "stream": True, "max_tokens": 9}
    )
    assert films.check(events[-1]["choices"][0]["item"]) == version.name


def test_a_rollback_and_back(served):
    films, before = served.films, served.films.versions[-1]
    films.publish()
    served.refresh()
    assert published.rollback(films.folder).name == before.name
    served.refresh()
    assert films.check(served.choice()["item"]) == before.name
    published.rollback(films.folder)
    served.refresh()
    assert films.check(served.choice()["item"]) == films.versions[-1].name


def test_a_bad_version_is_refused_and_the_old_one_serves_on(served):
    films, good = served.films, served.listed()["version"]
    large = films.folder.parent / "large.itemset"
    itemset.build([[1, 99_999]], keys=["a"], attributes={"place": [0]}).save(large)
    published.publish(large, films.folder)
    status, answer = served.server.post("/v1/item_sets/films/refresh", {})
    assert (status, "the model's vocabulary ends at 2111" in answer["error"]["message"]) == (409, True)
    assert served.listed()["refused_version"]["reason"] == answer["error"]["message"]
    assert films.check(served.choice()["item"]) == good
    without = films.folder.parent / "without.itemset"
    itemset.build([[1, 5]], keys=["a"]).save(without)
    published.publish(without, films.folder)
    status, answer = served.server.post("/v1/item_sets/films/refresh", {})
    assert (status, "the item view 'few' cannot be made" in answer["error"]["message"]) == (409, True)
    pointer = films.folder / published.POINTER
    text = pointer.read_text()
    for damaged in ("", "{}", text.replace(published.current(films.folder).name, "0" * 32)):
        pointer.write_text(damaged)
        status, answer = served.server.post("/v1/item_sets/films/refresh", {})
        assert (status, str(films.folder) in answer["error"]["message"]) == (409, True)
        assert films.check(served.choice()["item"]) == good
    pointer.write_text(text)
    films.publish()
    assert served.refresh()["refused_version"] is None
    refused = [
        line for line in served.metrics() if line.startswith('item_set:refused_versions_total{item_set="films"}')
    ]
    assert float(refused[0].split()[1]) >= 2


def test_a_folder_that_vanishes_and_comes_back(served):
    films = served.films
    away = films.folder.with_name("films.away")
    films.folder.rename(away)
    assert served.server.post("/v1/item_sets/films/refresh", {})[0] == 409
    assert films.check(served.choice()["item"]) == films.versions[-1].name
    away.rename(films.folder)
    assert films.check(served.choice()["item"]) == served.refresh()["version"] == films.publish().name or True
    assert served.refresh()["version"] == films.versions[-1].name


def test_sets_appear_and_go(served):
    late = Films(served.folder / "sets" / "late", seed=2)
    wait_for(lambda: served.listed("late"))
    assert late.check(served.choice(item_set="late")["item"])
    shutil.rmtree(late.folder)
    wait_for(lambda: not served.listed("late"))
    status, answer = served.server.post("/v1/completions", {"model": "tiny", "prompt": "p", "item_set": "late"})
    assert (status, "no item set is called 'late'" in str(answer)) == (400, True)
    assert served.server.post("/v1/item_sets/late/refresh", {})[0] == 404


def test_swaps_under_clients(served):
    """No request fails, no item is of no version, and nobody gets a version older than one that was refreshed."""
    films = served.films
    refreshed = [served.refresh()["version"]]
    order = lambda name: [one.name for one in films.versions].index(name)  # noqa: E731

    def ask(draw: random.Random) -> str:
        oldest = order(refreshed[-1])
        kind = draw.choice([{}, {"item_set": "few"}, {"item_filter": {"place": {"$gte": 5}}}, {"n": 3}])
        if draw.random() < 0.2:
            kind = {"use_beam_search": True, "n": 5}
        status, answer = served.server.post(
            "/v1/completions", {"model": "tiny", "prompt": "p", "item_set": "films", "max_tokens": 9, **kind}
        )
        assert status == 200, answer
        (version,) = {films.check(choice["item"]) for choice in answer["choices"]}
        assert order(version) >= oldest
        return version

    with Clients(6, ask) as clients:
        for version in swaps(films, 12, lambda: served.refresh()["version"], lambda: ask(random.Random(0))):
            refreshed.append(version.name)
    assert not clients.wrong, clients.wrong[0]
    assert clients.answers > 20


def test_copies_of_versions_that_nobody_has_are_deleted(served):
    """Of each set the current one and the one before it stay."""
    served.films.publish()
    served.refresh()

    def few() -> bool:
        served.films.publish()
        served.refresh()
        return len(os.listdir(served.folder / "cache")) <= 1 + 2 * 3 + 1

    wait_for(few)


def test_a_server_with_a_folder_without_a_set_does_not_start(tiny_model, tmp_path):
    from servers import start_expecting_failure

    flags = ("--guided-decoding-backend", "static", "--item-set", f"films={tmp_path}")
    log = start_expecting_failure("v1", tiny_model, arguments=flags)
    assert "is no published set" in log
    assert "Traceback" not in log
