"""Measures a catalogue that changes while it is served: how soon a version serves everywhere, and what swaps cost.

python benchmarks/live.py --json docs/benchmarks/live.json

In SGLang's virtual environment it measures SGLang, else vLLM (model runner V2, device path), with a tiny random model.

serve: versions of 2 x 10^7 random semantic IDs are published to a server. "Publish" checks and copies the index;
"serves" is from then until a refresh returns: every process has the new version, and new requests get it.
swaps: 32 clients ask for items of three sets, streamed, while each swap follows the one before it, and without swaps,
five times in turns. Each answer must be an item of its version, and of no version older than one that a refresh had
returned before; a client ends at one that is not. The time to the first token, with swaps and without; memory after 5
swaps and after the last.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from index import sorted_ids
from inline_load import sglang_is_here  # which puts the tests on the path

import itemset
from itemset import published

SETS, CLIENTS, SWAPS, TURNS, ITEMS = 3, 32, 100, 5, 2e7
MIB = 1 << 20


def films_in(folder: Path) -> list[Any]:
    from live import Films  # of the tests

    return [Films(folder / "sets" / f"films{i}", seed=i) for i in range(SETS)]


def start(folder: Path, **options: Any) -> Any:
    from models import cached_tiny_llama

    given = {"item_set_dir": str(folder / "sets"), "item_set_cache": str(folder / "cache"), **options}
    if sglang_is_here():
        import sglang_servers

        env = {"SGLANG_STATIC": json.dumps(given)}
        return sglang_servers.Server(cached_tiny_llama(), forked=False, env=env, grammar_backend="static", timeout=600)
    import servers

    flags = ("--guided-decoding-backend", "static", "--additional-config", json.dumps(given))
    return servers.Server("v2", cached_tiny_llama(), arguments=flags, timeout=600)


def memory(folder: Path) -> float:
    """MiB that the server's processes have to themselves, and their share of what they have together."""
    ours = [one for one in psutil.process_iter() if str(folder) in _files(one)]
    return sum(one.memory_full_info().pss for one in ours) / MIB


def _files(process: psutil.Process) -> str:
    try:
        return " ".join(one.path for one in process.memory_maps()) if process.pid != psutil.Process().pid else ""
    except psutil.Error:
        return ""


def refresh(server: Any, name: str) -> str:
    status, entry = server.post(f"/v1/item_sets/{name}/refresh", {}, timeout=600)
    assert status == 200, entry
    return str(entry["version"])


def serve(items: int, rounds: int) -> list[dict[str, float]]:
    """Seconds of each publication, and until the version serves."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sets").mkdir()
        rows, index = sorted_ids(items), folder / "ids.itemset"
        rows += 10  # no end token, and within the tiny model's vocabulary
        itemset.build(rows).save(index)
        published.publish(index, folder / "sets" / "ids")
        server = start(folder)
        try:
            refresh(server, "ids")
            for _ in range(rounds):
                rows = rows[1:]
                itemset.build(rows).save(index)
                began = time.perf_counter()
                version = published.publish(index, folder / "sets" / "ids")
                middle = time.perf_counter()
                assert refresh(server, "ids") == version.name
                end = time.perf_counter()
                found.append({"publish": middle - began, "serves": end - middle, "both": end - began})
        finally:
            server.close()
    return found


class Load:
    """What clients ask of three sets, each answer of which is checked."""

    def __init__(self, server: Any, sets: list[Any]) -> None:
        self._server, self._sets = server, sets
        self.first_tokens: list[float] = []
        self.refreshed = [0] * len(sets)  # the number of the latest version that a refresh has returned

    def ask(self, draw: random.Random) -> str:
        """One request of a client; returns the version of its answer. Raises AssertionError for one that is wrong."""
        which = draw.randrange(len(self._sets))
        films, oldest = self._sets[which], self.refreshed[which]
        asked = {"model": "tiny", "prompt": "p", "item_set": films.folder.name, "max_tokens": 9, "stream": True}
        connection = http.client.HTTPConnection(self._server.url.removeprefix("http://"), timeout=600)
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
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


def swaps(count: int) -> dict[str, Any]:
    from live import Clients  # of the tests

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = films_in(folder)
        server = start(folder, item_set_refresh_seconds=0.2)
        try:
            warm, swapping, alone = (Load(server, sets) for _ in range(3))
            alone.refreshed = swapping.refreshed
            with Clients(CLIENTS, warm.ask) as clients:
                time.sleep(10)
            wrong, held, seconds = clients.wrong, {}, 0.0
            for turn in range(TURNS):
                with Clients(CLIENTS, swapping.ask) as clients:
                    began = time.perf_counter()
                    for i in range(turn * count // TURNS, (turn + 1) * count // TURNS):
                        films = sets[i % SETS]
                        version = films.publish()
                        assert refresh(server, films.folder.name) == version.name
                        swapping.refreshed[i % SETS] = len(films.versions) - 1
                        if i + 1 in (5, count):
                            held[i + 1] = memory(folder)
                    took = time.perf_counter() - began
                wrong, seconds = wrong + clients.wrong, seconds + took
                with Clients(CLIENTS, alone.ask) as clients:
                    time.sleep(max(5, took))
                wrong += clients.wrong
        finally:
            server.close()
    with_swaps, without = (float(np.percentile(one.first_tokens, 99)) for one in (swapping, alone))
    return {
        "swaps": count,
        "answers": len(swapping.first_tokens),
        "wrong": len(wrong),
        "first wrong": [repr(error)[:300] for error in wrong[:1]],
        "seconds a swap": seconds / count,
        "p99 first token, without (s)": without,
        "p99 first token, swaps (s)": with_swaps,
        "ratio": with_swaps / without,
        "memory after 5 (MiB)": held.get(5, float("nan")),
        "memory at the end (MiB)": held[count],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--items", type=float, default=ITEMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--swaps", type=int, default=SWAPS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = "SGLang" if sglang_is_here() else "vLLM"
    found: dict[str, Any] = {"engine": engine, "items": int(args.items)}
    if args.rounds:
        found["serve"] = serve(int(args.items), args.rounds)
        print(
            f"{engine}: versions of {int(args.items):,} items\n\n| publish (s) | serves (s) | both (s) |\n|--:|--:|--:|"
        )
        for row in found["serve"]:
            print(f"| {row['publish']:.2f} | {row['serves']:.2f} | {row['both']:.2f} |")
    if args.swaps:
        found["swaps"] = swaps(args.swaps)
        print(f"\n{engine}: {args.swaps} swaps under {CLIENTS} clients of {SETS} sets\n\n| | |\n|---|--:|")
        for name, value in found["swaps"].items():
            print(f"| {name} | {value:,.3f} |" if isinstance(value, float) else f"| {name} | {value} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
