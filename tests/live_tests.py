"""What holds of published sets that change while a server of either engine serves them. Test modules import these."""

from __future__ import annotations

import os
import random
import shutil
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from live import FEW, Clients, Films, Served, swaps
from servers import wait_for

import itemset
from itemset import published


def bad(served: Served) -> Path:
    """An index with a token that the model has not."""
    path = served.folder / "large.itemset"
    itemset.build([[5, 99_999]], keys=["a"], attributes={"place": [0]}).save(path)
    return path


def test_what_is_served_is_listed(served: Served) -> None:
    entry, version = served.listed(), served.films.versions[-1]
    assert (entry["version"], entry["items"]) == (version.name, version.items)
    assert entry["followed"]
    assert entry["path"] == ("host" if "host path" in served.server.log() else "device")
    assert served.listed("other")["version"]


def test_a_damaged_pointer_has_not_stopped_the_start(served: Served) -> None:
    """As it lay in the folder when this server started. The server is told of a good one."""
    folder = served.folder / "sets" / "broken"
    assert str(folder) in served.listed("broken")["refused_version"]["reason"]
    assert "Item set 'broken' is not served: " in served.server.log()
    shutil.rmtree(folder)
    version = Films(folder, seed=5).versions[0]
    wait_for(lambda: served.listed("broken").get("version") == version.name)
    shutil.rmtree(folder)


def test_a_new_version_is_noticed(served: Served) -> None:
    version = served.films.publish()
    wait_for(lambda: served.films.check(served.choice()["item"]) == version.name)
    assert served.listed()["previous_versions"] == [one.name for one in reversed(served.films.versions[:-1])]


def test_every_request_gets_the_new_version(served: Served) -> None:
    films, version = served.films, served.take_up()
    keys = [*films.items[version.name]]
    answers = [
        served.choice(),
        served.choice("/v1/chat/completions"),
        served.choice(item_filter={"place": {"$gte": 10}}),
        served.choice(exclude_keys=keys[:20]),
        served.choice(only_keys=keys[:3]),
        served.choice(item_filter={"place": {"$lt": 40}}, exclude_keys=keys[5:10]),
    ]
    assert {films.check(choice["item"]) for choice in answers} == {version.name}
    assert films.check(served.choice(**FEW)["item"], most=20) == version.name
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


def test_a_rollback_and_back(served: Served) -> None:
    films, before = served.films, served.films.versions[-1]
    served.take_up()
    assert published.rollback(films.folder).name == before.name
    served.refresh()
    assert films.check(served.choice()["item"]) == before.name
    published.rollback(films.folder)
    served.refresh()
    assert films.check(served.choice()["item"]) == films.versions[-1].name


def test_a_bad_version_is_refused_and_the_old_one_serves_on(served: Served) -> None:
    films, good = served.films, served.listed()["version"]
    published.publish(bad(served), films.folder)
    status, answer = served.server.post("/v1/item_sets/films/refresh", {})
    assert (status, "the model's vocabulary ends at 2111" in answer["error"]["message"]) == (409, True)
    assert served.listed()["refused_version"]["reason"] == answer["error"]["message"]
    assert films.check(served.choice()["item"]) == good
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


def test_a_folder_that_vanishes_and_comes_back(served: Served) -> None:
    films = served.films
    away = films.folder.with_name("films.away")
    films.folder.rename(away)
    assert served.server.post("/v1/item_sets/films/refresh", {})[0] == 409
    assert films.check(served.choice()["item"]) == films.versions[-1].name
    away.rename(films.folder)
    version = films.publish()
    assert films.check(served.choice()["item"]) in [one.name for one in films.versions[-2:]]
    assert served.refresh()["version"] == version.name


def test_sets_appear_and_go(served: Served) -> None:
    late = Films(served.folder / "sets" / "late", seed=2)
    wait_for(lambda: served.listed("late").get("version"))
    assert late.check(served.choice(item_set="late")["item"])
    shutil.rmtree(late.folder)
    wait_for(lambda: not served.listed("late"))
    status, answer = served.server.post("/v1/completions", {"model": "tiny", "prompt": "p", "item_set": "late"})
    assert (status, "no item set is called 'late'" in str(answer)) == (400, True)
    assert served.server.post("/v1/item_sets/late/refresh", {})[0] == 404


def test_names_of_any_kind(served: Served) -> None:
    """Of folders that are served, and of some that are not: those keep no other set from its next version."""
    Films(served.folder / "sets" / "Füße @ home", seed=4)
    shutil.copytree(served.films.folder, served.folder / "sets" / os.fsdecode(b"\xff:"))
    wait_for(lambda: served.listed("Füße @ home").get("version"))
    assert served.choice(item_set="Füße @ home")["item"]["item_set_version"]
    quoted = urllib.parse.quote("Füße @ home")
    assert served.server.post(f"/v1/item_sets/{quoted}/refresh", {})[0] == 200
    assert served.server.post("/v1/item_sets/..%2F..%2Fetc/refresh", {})[0] == 404
    served.take_up()


def test_many_publish_and_many_refresh_at_once(served: Served) -> None:
    films = served.films
    with ThreadPoolExecutor(50) as threads:
        asked = [threads.submit(served.server.post, "/v1/item_sets/films/refresh", {}) for _ in range(25)]
        published_here = [threads.submit(publish_same, films) for _ in range(20)]
        asked += [threads.submit(served.server.post, "/v1/item_sets/films/refresh", {}) for _ in range(25)]
        assert films.check(served.choice()["item"])
    assert {one.result()[0] for one in asked} == {200}
    assert len({one.result() for one in published_here}) == 1
    assert served.refresh()["version"] == published.current(films.folder).name


def publish_same(films: Films) -> str:
    """Publish the current version again, as others do at the same time."""
    return published.publish(films.versions[-1].path, films.folder, keep=1_000).name


def test_swaps_under_clients(served: Served) -> None:
    """No request fails, no item is of no version, and nobody gets a version older than one that was refreshed."""
    films = served.films
    refreshed = [served.refresh()["version"]]
    order = lambda name: [one.name for one in films.versions].index(name)  # noqa: E731

    def ask(draw: random.Random) -> str:
        oldest = order(refreshed[-1])
        kind = draw.choice([{}, FEW, {"item_filter": {"place": {"$gte": 5}}}, {"n": 3}])
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


def test_a_version_that_comes_while_long_requests_run(served: Served) -> None:
    """Each answer is of one version throughout, also a slate of many items and a ranked list."""
    films = served.films
    slate = {"model": "tiny", "prompt": "p", "slate": {"item_set": "films", "n": 30, "separator": ""}}
    listed = {"model": "tiny", "prompt": "p", "item_set": "films", "use_beam_search": True, "n": 20}
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(served.server.post, "/v1/completions", slate | {"max_tokens": 130}) for _ in range(3)]
        asked += [pool.submit(served.server.post, "/v1/completions", listed | {"max_tokens": 9}) for _ in range(3)]
        before, version = films.versions[-1].name, served.take_up().name
        asked.append(pool.submit(served.server.post, "/v1/completions", slate | {"max_tokens": 130}))
    answered = []
    for status, answer in (one.result() for one in asked):
        assert status == 200, answer
        choices = answer["choices"]
        items = choices[0].get("items") or [choice["item"] for choice in choices]
        assert len({item["key"] for item in items}) == len(items) == (30 if len(choices) == 1 else 20)
        answered.append({films.check(item) for item in items})
    assert all(one in ({before}, {version}) for one in answered)
    assert answered[-1] == {version}


def test_copies_of_versions_that_nobody_has_are_deleted(served: Served) -> None:
    """Each set's current version stays, and the one before it of a set that has changed; one may be on its way."""
    served.take_up()
    said = served.server.get("/v1/item_sets")[1]
    sets = len(said["data"])  # other tests of this module may have made some
    assert said["lists_by_rounds"] is None

    def few() -> bool:
        served.take_up()
        for _ in range(20):  # what holds a version goes with Python's collector, after hundreds of requests
            served.choice()
        return len(set(os.listdir(served.folder / "cache")) - {"lock", "built"}) <= sets + 1 + 1

    wait_for(few)
