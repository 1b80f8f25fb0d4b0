"""Published sets that change under the processes of an engine: every process in this one, without an engine."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import changes
import numpy as np
import pytest
from live import OPTIONS, Films
from models import tiny_tokenizer

import itemset
from itemset import published
from itemset.errors import ItemSetError, ItemSetWarning
from itemset.masking.arena import Arena, ArenaFullError, arena_bytes, room_for
from itemset.masking.arena_plan import Holdings, Plan
from itemset.serving import metrics
from itemset.serving.catalogue import Catalogue, RefusedError, with_versions
from itemset.serving.config import ModelLimits, StaticConfig, Words
from itemset.serving.engine.version_rollout import Preparer
from itemset.serving.front.admission import Checks
from itemset.serving.front.request import ItemRequest
from itemset.serving.front.version_watcher import Follower
from itemset.serving.wire import Stage

WORDS = Words("max_model_len", "--max-model-len", "min_tokens", "--additional-config")


class Processes:
    """The front ends of an engine, and its engine cores, as they would be in processes of their own."""

    def __init__(self, folder: Path, *, engines: int = 1, **options: Any) -> None:
        self.options = with_versions({**OPTIONS, "item_set_cache": str(folder / "cache"), **options})
        self.config = StaticConfig.of(self.options)
        self.engines = [Catalogue(self.config) for _ in range(engines)]
        self.preparers = [Preparer(catalogue, logging.getLogger("test")) for catalogue in self.engines]
        self.checks = [checks(self.config)]
        self.follower = Follower(self.checks[0], self.config, self.ask, path="host", log=logging.getLogger("test"))

    def ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        return [preparer.answer(question) for preparer in self.preparers]


def checks(config: StaticConfig) -> Checks:
    return Checks(config, tiny_tokenizer(), WORDS, ModelLimits(2112, 256, 0, {1}))


@pytest.fixture
def films(tmp_path: Path) -> Films:
    return Films(tmp_path / "sets" / "films")


@pytest.fixture
def processes(films: Films, tmp_path: Path) -> Processes:
    return Processes(tmp_path, item_sets={"films": str(films.folder)})


def test_requests_keep_the_version_that_they_began_with(films, processes):
    front = processes.checks[0]
    first = front.made(ItemRequest(item_set="films"))
    narrowed = front.made(ItemRequest(item_set="films", selection={"exclude_keys": ["v0-1"]}))
    references = [one.reference for one in (first, narrowed)]
    for _ in range(3):
        films.publish()
        processes.follower.look()
    assert {str(front.catalogue.version_fields(one)["item_set_version"]) for one in references} == {
        films.versions[0].name
    }
    assert [len(front.catalogue[one]) for one in references] == [films.versions[0].items, films.versions[0].items - 1]
    # An engine has closed it by now, and opens its copy again.
    assert len(processes.engines[0][references[0]]) == films.versions[0].items
    assert front.catalogue.version_fields(front.catalogue.reference("films")) == {
        "item_set_version": films.versions[-1].name
    }


def test_no_request_gets_a_version_before_every_engine_has_it(films, tmp_path):
    processes = Processes(tmp_path, engines=2, item_sets={"films": str(films.folder)})
    slow, ready = processes.preparers[1].answer, threading.Event()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        return slow(question) if ready.is_set() else {"stage": Stage.OPENING}

    processes.preparers[1].answer = answer  # type: ignore[method-assign]
    version = films.publish()
    looking = threading.Thread(target=processes.follower.look)
    looking.start()
    reference = processes.checks[0].catalogue.reference
    while processes.engines[0].reference("films") == reference("films"):
        time.sleep(0.001)  # the other engine has it
    assert version.name not in reference("films")
    ready.set()
    looking.join()
    assert all(version.name in one.reference("films") for one in (processes.checks[0].catalogue, *processes.engines))


def test_a_copy_that_is_damaged_between_two_processes_is_made_again(films, processes, tmp_path):
    asked, damaged = processes.preparers[0].answer, list[str]()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question["type"] == "Prepare" and not damaged:
            copy = tmp_path / "cache" / question["version"]
            copy.chmod(0o600)
            changes.flip(copy)
            damaged.append(question["version"])
        return asked(question)

    processes.preparers[0].answer = answer  # type: ignore[method-assign]
    version = films.publish()
    processes.follower.look()
    assert damaged == [version.name]
    assert (tmp_path / "cache" / version.name).read_bytes() == version.path.read_bytes()
    assert processes.engines[0].registered["films"].items() == itemset.load(version.path).items()


def test_a_version_that_an_engine_cannot_have_is_refused_everywhere(films, tmp_path):
    processes = Processes(tmp_path, engines=2, item_sets={"films": str(films.folder)})
    before = films.versions[0]
    processes.preparers[1].answer = (  # type: ignore[method-assign]
        lambda question: {"refused": "no such file there"} if question["type"] == "Prepare" else {}
    )
    films.publish()
    with pytest.raises(RefusedError, match="no such file there"):
        processes.follower.refresh("films")
    assert processes.checks[0].catalogue.reference("films") == f"version:{before.name}@films"
    assert processes.follower.described()["data"][0]["refused_version"]["reason"] == "no such file there"


def test_a_folder_that_vanishes_while_a_version_is_taken_up_is_tried_again(films, processes, tmp_path):
    asked, away = processes.preparers[0].answer, tmp_path / "away"

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question["type"] == "Prepare":
            films.folder.rename(away)
            return {"refused": "cannot be read there"}
        return asked(question)

    processes.preparers[0].answer = answer  # type: ignore[method-assign]
    version = films.publish()
    with pytest.raises(RefusedError, match="publish an index there"):
        processes.follower.refresh("films")
    processes.follower.look()
    entry = processes.follower.described()["data"][0]
    assert (entry["version"], entry["refused_version"]["version"]) == (films.versions[0].name, None)
    assert "publish an index there" in entry["refused_version"]["reason"]
    away.rename(films.folder)
    processes.preparers[0].answer = asked  # type: ignore[method-assign]
    processes.follower.look()
    assert processes.follower.described()["data"][0]["version"] == version.name


def test_a_folder_that_is_published_anew_is_taken_up(films, processes):
    """Its versions are numbered from 1 again."""
    shutil.rmtree(films.folder)
    processes.follower.look()
    assert processes.follower.described()["data"][0]["version"] == films.versions[0].name
    version = films.publish()
    assert version.sequence == films.versions[0].sequence == 1
    processes.follower.look()
    assert processes.follower.described()["data"][0]["version"] == version.name


def test_open_versions_and_copies_stay_two(films, processes, tmp_path):
    import weakref

    seen = []
    for _ in range(6):
        films.publish()
        processes.follower.look()
        front = processes.checks[0]
        front.made(ItemRequest(item_set="films", selection={"item_filter": {"place": {"$gte": 3}}}))
        seen += [weakref.ref(one.registered["films"]) for one in (front.catalogue, *processes.engines)]
    gc.collect()
    assert [one() is None for one in seen] == [True] * 8 + [False] * 4
    films.publish()
    processes.follower.look()
    assert len(set(os.listdir(tmp_path / "cache")) - {"lock"}) <= 3
    published.rollback(films.folder)
    begin = os.listdir(tmp_path / "cache")
    processes.follower.look()
    assert os.listdir(tmp_path / "cache") == begin  # nothing was copied


def test_a_refused_version_leaves_no_copy_when_another_comes_meanwhile(films, processes, tmp_path):
    asked, refused = processes.preparers[0].answer, films.publish()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question.get("version") != refused.name:
            return asked(question)
        films.publish()
        return {"refused": "no room"}

    processes.preparers[0].answer = answer  # type: ignore[method-assign]
    processes.follower.look()
    assert processes.follower.described()["data"][0]["version"] == films.versions[-1].name
    gc.collect()
    films.publish()
    processes.follower.look()
    assert not (tmp_path / "cache" / refused.name).exists()


def test_a_version_that_stays_open_is_begun_already(films, processes):
    """As a worker finds that of a rollback."""
    films.publish()
    processes.follower.look()
    worker, first = processes.engines[0], films.versions[0].name
    opened = worker.begun("films", first)
    assert opened is not None
    worker.serve(opened)
    assert worker.reference("films") == f"version:{first}@films"


def test_a_filter_of_a_closed_version_is_known_while_it_is_held(films, processes):
    """Made after its version was closed, as by a request that was slow; nothing of closed versions stays."""
    front = processes.checks[0]
    first = front.catalogue.reference("films")
    held = front.catalogue[first]
    for _ in range(3):
        films.publish()
        processes.follower.look()
    late = front._selections.get({"item_filter": {"place": {"$gte": 3}}}, first)
    assert front.catalogue[late.reference] is late.item_set
    assert len(late.item_set) == len(held) - 3
    assert not front.catalogue._inline
    reference = late.reference
    del late
    gc.collect()
    assert front.catalogue.inline(reference) is None
    kept = front.made(ItemRequest(item_set="films", selection={"item_filter": {"place": {"$gte": 3}}}))
    assert [*front.catalogue._inline] == [kept.reference]


def measured() -> set[str]:
    """The sets whose version the metrics name."""
    return {sample.labels["item_set"] for metric in metrics.VERSIONS.collect() for sample in metric.samples}


def test_sets_of_a_folder_come_and_go(films, tmp_path):
    processes = Processes(tmp_path, item_set_dir=str(films.folder.parent))
    assert processes.config.item_set_versions == {"films": films.versions[0].name}
    more = Films(films.folder.parent / "more", seed=3)
    processes.follower.look()
    assert {entry["name"] for entry in processes.follower.described()["data"]} == {"films", "more"}
    assert len(processes.engines[0]["more"]) == more.versions[0].items
    assert {"films", "more"} <= measured()
    more.folder.rename(films.folder.parent.parent / "away")
    processes.follower.look()
    assert [len(one.open_sets()) for one in processes.engines] == [1]
    assert "more" not in measured()
    with pytest.raises(RefusedError, match="no item set is called 'more'"):
        processes.checks[0].made(ItemRequest(item_set="more"))
    with pytest.raises(RefusedError, match="no item set is called 'more'"):
        processes.follower.refresh("more")


GOOD = {"name": "a" * 32, "sequence": 1, "published": "2026-01-02T03:04:05Z", "items": 1, "bytes": 1}
Damage = Callable[[Path], str | None]
"""Makes what is bad in a folder; returns the version that is refused, if the pointer can be read."""


def pointing(content: str) -> Damage:
    def damage(folder: Path) -> None:
        folder.mkdir()
        (folder / "current.json").write_text(content)

    return damage


def holding(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> str:
        version = Films(folder, seed=3).versions[0]
        version.path.chmod(0o600)
        version.path.write_bytes(change(version.path.read_bytes()))
        return version.name

    return damage


def of_another_model(folder: Path) -> str:
    Films(folder, seed=3)
    path = folder.parent / "other.itemset"
    itemset.build([[5000, 6]]).save(path)
    return published.publish(path, folder).name


BAD: dict[str, tuple[Damage, str]] = {
    "cut pointer": (pointing('{"format": 1, "vers'), "truncated"),
    "another type": (pointing('{"format": [1], "versions": []}'), "format"),
    "a version of another type": (
        pointing(json.dumps({"format": 1, "versions": [GOOD | {"items": [3]}]})), "versions.*items"
    ),
    "of a later format": (pointing(json.dumps({"format": 2, "versions": [GOOD]})), "upgrade static-backend"),
    "without its file": (pointing(json.dumps({"format": 1, "versions": [GOOD]})), "publish its index again"),
    "a page": (pointing("<html>404</html>"), "malformed"),
    "cut index": (holding(lambda content: content[:-9]), "build it again"),
    "no index": (holding(lambda content: b"PK not ours" * 99), "is not an item-set index"),
    "an index of a later format": (holding(lambda content: content[:8] + b"\x63" + content[9:]), "upgrade"),
    "of another model": (of_another_model, "the model's vocabulary ends at 2111"),
}  # fmt: skip


@pytest.mark.parametrize("which", BAD)
def test_what_is_bad_in_a_folder_leaves_its_set_out(films, tmp_path, caplog, which):
    """The start serves the other sets. What is bad is named once, and taken up once it is good."""
    (damage, why), folder = BAD[which], films.folder.parent / "bad"
    version = damage(folder)
    counted = metrics.REFUSED_VERSIONS.labels("bad")._value.get()
    with pytest.warns(ItemSetWarning, match=f"the item set 'bad' .*{why}"):
        processes = Processes(tmp_path, item_set_dir=str(folder.parent))
    assert processes.config.item_set_versions["films"] == films.versions[0].name
    assert [*processes.checks[0].catalogue.registered] == ["films"]
    for _ in range(2):
        processes.follower.look()
    listed = {entry["name"]: entry for entry in processes.follower.described()["data"]}
    assert listed["films"]["refused_version"] is None
    assert (listed["bad"]["version"], listed["bad"]["refused_version"]["version"]) == (None, version)
    reason = listed["bad"]["refused_version"]["reason"]
    assert re.search(why, reason)
    assert version or str(folder) in reason
    named = f"Version {version} of the item" if version else "Item"
    assert caplog.text.count(f"{named} set 'bad' is not served: ") == 1
    assert metrics.REFUSED_VERSIONS.labels("bad")._value.get() == counted + 1
    with pytest.raises(RefusedError, match="no item set is called 'bad'"):
        processes.checks[0].made(ItemRequest(item_set="bad"))
    shutil.rmtree(folder)
    good = Films(folder, seed=4).versions[0]
    processes.follower.look()
    listed = {entry["name"]: entry for entry in processes.follower.described()["data"]}
    assert listed["bad"]["version"] == good.name
    assert len(processes.engines[0]["bad"]) == good.items


def test_a_set_that_is_named_stops_the_start(films, tmp_path):
    """Whoever has named it waits for it."""
    (films.folder / "current.json").write_bytes(b"{}")
    with pytest.raises(ItemSetError, match=r"the item set 'films' cannot be opened: .*format"):
        Processes(tmp_path, item_sets={"films": str(films.folder)}, item_set_dir=str(films.folder.parent))


def test_a_folder_without_sets_may_get_some(tmp_path):
    (tmp_path / "sets").mkdir()
    processes = Processes(tmp_path, item_set_dir=str(tmp_path / "sets"))
    assert processes.config.item_set_versions == {}
    Films(tmp_path / "sets" / "films")
    processes.follower.look()
    assert processes.checks[0].made(ItemRequest(item_set="films")).reference.endswith("@films")


def test_a_set_of_a_file_is_not_followed(films, tmp_path):
    path = films.make()
    processes = Processes(tmp_path, item_sets={"films": str(path)})
    assert not processes.follower.follows
    entry = processes.follower.refresh("films")
    assert (entry["followed"], entry["previous_versions"]) == (False, [])
    reference = processes.checks[0].catalogue.reference("films")
    assert processes.checks[0].catalogue.version_fields(reference) == {}


def versions_of(count: int) -> list[itemset.ItemSet]:
    draw = np.random.default_rng(0)
    return [itemset.build(draw.integers(0, 300, (400, 5))) for _ in range(count)]


def test_a_version_that_is_overtaken_leaves_its_room_to_the_next():
    served, *others = versions_of(3)
    holdings = Holdings(Plan(arena_bytes([served, max(others, key=room_for)], 256)), {"films": served})
    for one in others:
        holdings.hold("films", one)


def test_the_version_before_stays_until_its_room_is_needed():
    first, second, third = versions_of(3)
    arena = Arena(arena_bytes([first, second], 256), max_sets=8)
    holdings = Holdings(arena.plan, {})

    def take_up(item_set: itemset.ItemSet) -> int:
        pieces, steps = holdings.hold("films", item_set), 1
        while not arena.place_next("films", item_set, pieces):
            steps += 1
        holdings.settle("films", item_set.digest)
        return steps

    take_up(first)
    take_up(second)
    held = arena.plan.acquire(first)  # a request that still runs
    assert arena.holds(first.digest, held.number, held.start)
    with pytest.raises(ArenaFullError):
        holdings.hold("films", third)
    arena.plan.release(held.number)
    take_up(third)
    take_up(second)
    arena = Arena(arena_bytes([first, second], 256), max_sets=8)
    holdings = Holdings(arena.plan, {})
    take_up(first)
    take_up(second)
    number, start = holdings.hold("films", first)
    assert arena.holds(first.digest, number, start)  # a rollback copies nothing


def test_a_version_comes_in_pieces(monkeypatch):
    from itemset.masking import arena as arenas

    monkeypatch.setattr(arenas, "PIECE", 1024)
    (item_set,) = versions_of(1)
    arena = Arena(room_for(item_set), max_sets=2, kernels="triton")
    holdings = Holdings(arena.plan, {})
    pieces, steps = holdings.hold("films", item_set), 1
    while not arena.place_next("films", item_set, pieces):
        steps += 1
    assert steps >= item_set.nbytes // 1024
