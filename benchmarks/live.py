"""A catalogue that changes while it is served: how soon a version serves everywhere, and what changes cost the clients.

python benchmarks/live.py --json docs/benchmarks/live.json

In SGLang's virtual environment it measures SGLang, else vLLM (model runner V2, device path), with a tiny random model.

serve: versions of random semantic IDs are published to a server. "publish" checks and copies the index; "serves" is
from then until a refresh returns: every process has the new version, and new requests get it.
swaps: clients ask for items of three sets, streamed, while each swap follows the one before it, and without swaps, in
turns. Each answer must be an item of its version, and of none older than one that a refresh had returned before. The
99th percentile of the time to the first token, with swaps and without; memory after 5 swaps and after the last.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from index import sorted_ids
from runner import ROOT, Report, Row, engine_here, held, parser, server, whole

import itemset
from itemset import published

SETS, CLIENTS, TURNS = 3, 32, 5


def of_tests() -> Any:
    """The tests' module of the same name: catalogues that change, and clients."""
    spec = importlib.util.spec_from_file_location("live_of_tests", ROOT / "tests" / "live.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def start(folder: Path, **options: Any) -> Any:
    given = {"item_set_dir": str(folder / "sets"), "item_set_cache": str(folder / "cache"), **options}
    return server(engine_here(), {}, options=given)


def refresh(running: Any, name: str) -> str:
    status, entry = running.post(f"/v1/item_sets/{name}/refresh", {}, timeout=600)
    assert status == 200, entry
    return str(entry["version"])


def serve(items: int, rounds: int) -> list[Row]:
    """Seconds of each publication, and until the version serves."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sets").mkdir()
        rows, index = sorted_ids(items), folder / "ids.itemset"
        rows += 10  # no end token, and within the tiny model's vocabulary
        itemset.build(rows).save(index)
        published.publish(index, folder / "sets" / "ids")
        with start(folder) as running:
            refresh(running, "ids")
            for _ in range(rounds):
                rows = rows[1:]
                itemset.build(rows).save(index)
                began = time.perf_counter()
                version = published.publish(index, folder / "sets" / "ids")
                middle = time.perf_counter()
                assert refresh(running, "ids") == version.name
                end = time.perf_counter()
                times = {"publish, s": middle - began, "serves, s": end - middle, "both, s": end - began}
                found.append({"items": items} | times)
    return found


class Load:
    """What clients ask of the sets; each answer is checked."""

    def __init__(self, url: str, sets: list[Any], refreshed: list[int]) -> None:
        """refreshed: of each set the number of the latest version that a refresh has returned."""
        self._address, self._sets, self._refreshed = url.removeprefix("http://"), sets, refreshed
        self.first_tokens: list[float] = []

    def ask(self, draw: random.Random) -> str:
        """One request of a client; returns the version of its answer. Raises AssertionError for one that is wrong."""
        which = draw.randrange(len(self._sets))
        films, oldest = self._sets[which], self._refreshed[which]
        body = {"model": "tiny", "prompt": "p", "item_set": films.folder.name, "max_tokens": 9, "stream": True}
        connection = http.client.HTTPConnection(self._address, timeout=600)
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        first = response.readline()
        self.first_tokens.append(time.perf_counter() - began)
        text = (first + response.read()).decode()
        connection.close()
        assert response.status == 200, text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        item = next(event["choices"][0]["item"] for event in reversed(events) if event.get("choices"))
        version = films.check(item)
        number = [one.name for one in films.versions].index(version)
        assert number >= oldest, f"version {number} after {oldest}"
        return str(version)


def swaps(count: int) -> Row:
    tests = of_tests()
    with tempfile.TemporaryDirectory() as name:
        folder, memory, seconds = Path(name), dict[int, float](), 0.0
        sets, refreshed = [tests.Films(folder / "sets" / f"films{i}", seed=i) for i in range(SETS)], [0] * SETS
        with start(folder, item_set_refresh_seconds=0.2) as running:
            warm, swapping, alone = (Load(running.url, sets, refreshed) for _ in range(3))
            with tests.Clients(CLIENTS, warm.ask) as clients:
                time.sleep(10)
            wrong = list(clients.wrong)
            for turn in range(TURNS):
                with tests.Clients(CLIENTS, swapping.ask) as clients:
                    began = time.perf_counter()
                    for i in range(turn * count // TURNS, (turn + 1) * count // TURNS):
                        films = sets[i % SETS]
                        version = films.publish()
                        assert refresh(running, films.folder.name) == version.name
                        refreshed[i % SETS] = len(films.versions) - 1
                        if i + 1 in (5, count):
                            memory[i + 1] = held(running._process._popen.pid)
                    took = time.perf_counter() - began
                wrong, seconds = wrong + clients.wrong, seconds + took
                with tests.Clients(CLIENTS, alone.ask) as clients:
                    time.sleep(max(5, took))
                wrong += clients.wrong
    with_swaps, without = (float(np.percentile(one.first_tokens, 99)) for one in (swapping, alone))
    row: Row = {
        "swaps": count,
        "answers": len(swapping.first_tokens),
        "wrong": len(wrong),
        "a swap, s": seconds / count,
    }
    row |= {"p99 without, s": without, "p99 with swaps, s": with_swaps, "ratio": with_swaps / without}
    return row | {"MiB after 5": memory.get(5), "MiB at the end": memory[count], "first wrong": repr(wrong[:1])[:300]}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--items", type=whole, default=2 * 10**7)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--swaps", type=int, default=100)
    arguments = options.parse_args()
    report = Report(arguments)
    if arguments.rounds:
        report.add(f"{engine_here()} serve", serve(arguments.items, arguments.rounds))
    if arguments.swaps:
        report.add(f"{engine_here()} swaps", [swaps(arguments.swaps)])


if __name__ == "__main__":
    main()
