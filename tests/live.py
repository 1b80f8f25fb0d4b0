"""A published set that changes while it is served: its versions, and what answers must say. For both engines."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from servers import HttpServer

import itemset
from itemset import published
from itemset.published import Version

OPTIONS = {"item_set_refresh_seconds": 0.2}


def broken(folder: Path) -> None:
    """Make what looks like a published set, with half of a pointer."""
    folder.mkdir(parents=True)
    (folder / published.POINTER).write_text('{"format": 1, "versions": [')


FEW = {"item_filter": {"place": {"$lt": 20}}}


class Films:
    """A published set. Each version has items of its own, beside some that all have; keys name the version."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self._draw, self._known = folder, np.random.default_rng(seed), threading.Lock()
        self.versions: list[Version] = []
        self.items: dict[str, dict[str, list[int]]] = {}  # by version: the items by their keys
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.publish()

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's, for this set alone, whose copies lie beside it."""
        return {"item_sets": {"films": str(self.folder)}, "item_set_cache": str(self.folder.parents[1] / "cache")}

    def make(self, **options: Any) -> Path:
        """The index file of one version more, in no folder yet."""
        number = len(self.versions)
        rows = np.unique(self._draw.integers(10, 200, (60, 4)), axis=0)
        rows[::3, 0] = 200 + number % 50
        rows = np.unique(rows, axis=0)
        keys = [f"v{number}-{place}" for place in range(len(rows))]
        made = itemset.build(rows, keys=keys, attributes={"place": list(range(len(rows)))}, **options)
        path = self.folder.parent / f"{self.folder.name}.itemset"
        made.save(path)
        self._made = dict(zip(keys, rows.tolist(), strict=True))
        return path

    def publish(self, path: Path | None = None) -> Version:
        """Make the next version current."""
        path = path or self.make()
        with self._known:  # a server may answer with the version before it is written down here
            version = published.publish(path, self.folder, keep=1_000)
            self.versions.append(version)
            self.items[version.name] = self._made
        return version

    def check(self, item: dict[str, Any] | None, most: int | None = None) -> str:
        """The version of an answer, whose key must be one of that version's. most: of how many of its first keys."""
        assert item is not None
        version = item["item_set_version"]
        with self._known:
            items = self.items[version]
        assert item["key"] in list(items)[:most]
        return str(version)

    def check_tokens(self, item: dict[str, Any], tokens: Sequence[int]) -> str:
        """The same, and its tokens must be those of the item."""
        version = self.check(item)
        assert self.items[version][item["key"]] == list(tokens)
        return version


class Clients:
    """Clients at the same time, each of which asks until it is told to stop.

    ask: one request of a client, the version of whose answer it returns. Raises whatever was wrong.
    """

    def __init__(self, count: int, ask: Callable[[random.Random], str]) -> None:
        self._ask, self._stop = ask, threading.Event()
        self.answers = 0
        self.wrong: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(random.Random(i),)) for i in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, draw: random.Random) -> None:
        while not self._stop.is_set():
            try:
                self._ask(draw)
                self.answers += 1
            except BaseException as error:
                self.wrong.append(error)
                return


class Served:
    """A server, the folder of its sets, and what is asked of it."""

    def __init__(self, server: HttpServer, folder: Path, films: Films) -> None:
        self.server, self.folder, self.films = server, folder, films

    def choice(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        """The first choice of an answer."""
        asked = {"prompt": "p"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "p"}]}
        body = {"model": "tiny", "item_set": "films", "max_tokens": 9, **asked, **body}
        status, answer = self.server.post(path, body)
        assert status == 200, answer
        return answer["choices"][0]

    def refresh(self, name: str = "films") -> dict[str, Any]:
        status, answer = self.server.post(f"/v1/item_sets/{name}/refresh", {})
        assert status == 200, answer
        return answer

    def take_up(self) -> Version:
        """Publish a version more, which the server must take up at once."""
        version, entry = self.films.publish(), self.refresh()
        assert (entry["version"], entry["items"]) == (version.name, version.items)
        return version

    def listed(self, name: str = "films") -> dict[str, Any]:
        status, answer = self.server.get("/v1/item_sets")
        assert status == 200, answer
        return {one["name"]: one for one in answer["data"]}.get(name, {})

    def metrics(self) -> list[str]:
        return [line for line in self.server.get("/metrics")[1].splitlines() if line.startswith("item_set:")]


def swaps(films: Films, count: int, refresh: Callable[[], str], ask: Callable[[], str]) -> Iterator[Version]:
    """Publish so many versions, each once the one before it was refreshed and answered with."""
    for _ in range(count):
        version = films.publish()
        assert refresh() == version.name
        assert ask() == version.name  # an older one would be an answer from before what was seen
        yield version


def check_versions(engine: Any, films: Films, refreshed: Callable[[Any], str]) -> None:
    """Each of three versions is taken up when the engine is told to, and gives an answer on each of two ranks.

    refreshed: tells it so in its process; returns the version of the one set.
    """
    for _ in range(3):
        version = films.publish()
        assert engine.call(refreshed) == version.name
        for _ in range(2):
            (answer,) = engine.ask(["p"], {"max_tokens": 9, "item_set": "films"})
            assert films.check(answer.said["item"]) == version.name
