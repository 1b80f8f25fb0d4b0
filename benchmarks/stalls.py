"""What ranked lists do to a server's other requests: /health and small requests, idle and beside 20 clients of lists.

python benchmarks/stalls.py --engine vllm-v2 --seconds 8 --json docs/benchmarks/stalls.json
python benchmarks/stalls.py --engine vllm-v2 --seconds 20 --rows 1e6 512 0 --widths 256 5000

A real server of the tiny model. The clients ask for lists of 300 over 10^6 semantic IDs of 8 tokens without pause,
while /health and small requests (one of four labels) are asked for again and again. Both rows come from one server.

`--rows`: what `max_list_rows_per_step` does for small requests, of one token each and `--rate` a second, beside a
client of lists of some beams (5,000) over IDs of 4 tokens; 0 is no such option: lists go on by time. A server for each
bound, whose steps have 512 tokens. The first row of each has no clients of lists: its list was made alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from runner import ENGINES, Report, Row, held, ms_of, parser, random_ids, saved, server, whole

WIDE, STEP = 5_000, 512  # beams of a list; tokens of a step


def again(work: Callable[[], Any], until: float, pause: float = 0.1) -> list[float]:
    """Milliseconds of each call until this time."""
    times = []
    while time.time() < until:
        times.append(ms_of(work))
        time.sleep(pause)
    return times


def at_rate(work: Callable[[], Any], until: float, rate: float) -> list[float]:
    """Milliseconds of each of `rate` calls a second, from when it was due."""
    times, due = [], time.time()
    while due < until:
        time.sleep(max(0.0, due - time.time()))
        work()
        times.append(1e3 * (time.time() - due))
        due += 1 / rate
    return times


def completion(running: Any, body: Row) -> None:
    status, answer = running.post("/v1/completions", body, timeout=300)
    assert status == 200, answer


def stalls(engine: str, seconds: float, items: int, lists: int) -> list[Row]:
    """ms of /health and small requests, idle and beside lists."""
    small: Row = {"model": "tiny", "prompt": [5, 6, 7], "item_set": "few", "max_tokens": 4, "temperature": 0}
    large: Row = {"model": "tiny", "prompt": list(range(100, 140)), "item_set": "ids", "use_beam_search": True}
    large |= {"n": 300, "max_tokens": 9}
    flags: Row = {"max_running_requests": 1_024, "max_total_tokens": 40_000}
    if engine != "sglang":
        flags = {"max_num_seqs": 32, "kv_cache_memory_bytes": 768 << 20, "block_size": 32}
    with tempfile.TemporaryDirectory() as name:
        sets = {"ids": saved(random_ids(items), Path(name, "ids.itemset"))}
        sets["few"] = saved([[200, 201], [202, 203], [204, 205], [206, 207]], Path(name, "few.itemset"))
        with server(engine, sets, **flags) as running:
            rows: list[Row] = []
            for body in (small, large | {"n": 10}):
                completion(running, body)  # compiles what is to be compiled
            for clients in (0, lists):
                until = time.time() + seconds
                with ThreadPoolExecutor(clients + 2) as pool:
                    made = [pool.submit(again, lambda: completion(running, large), until, 0) for _ in range(clients)]
                    health = pool.submit(again, lambda: running.get("/health"), until)
                    taken = again(lambda: completion(running, small), until)
                    done = sum(len(one.result()) for one in made)
                row: Row = {"engine": engine, "clients of lists": clients, "small, ms": median(taken)}
                row |= {
                    "95 %": float(np.percentile(taken, 95)),
                    "worst": max(taken),
                    "/health, worst": max(health.result()),
                }
                row |= {"x idle": row["small, ms"] / rows[0]["small, ms"]} if rows else {}
                rows.append(row | {"lists a second": done / seconds, "MiB": held(running._process._popen.pid)})
    return rows


def bounded(engine: str, seconds: float, items: int, width: int, bound: int, rate: float) -> list[Row]:
    """ms of small requests, idle and beside lists of some beams, whose rows in a step are bounded."""
    small: Row = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
    large: Row = {"model": "tiny", "prompt": list(range(100, 140)), "item_set": "ids", "use_beam_search": True}
    large |= {"n": 10, "width": width, "max_tokens": 5}
    options: Row = {"ranked_list_limit": WIDE} | ({"max_list_rows_per_step": bound} if bound else {})
    flags: Row = {"max_running_requests": 2 * WIDE + 100, "max_total_tokens": 100_000, "chunked_prefill_size": STEP}
    if engine != "sglang":
        options["ranked_list_beams"] = WIDE
        flags = {"max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 30, "block_size": 32, "max_num_batched_tokens": STEP}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        sets = {"ids": saved(random_ids(items, 4), Path(name, "ids.itemset"))}
        with server(engine, sets, options=options, **flags) as running, ThreadPoolExecutor(1) as pool:
            *_, alone = (ms_of(lambda: completion(running, body)) for body in (small, large, large))  # noqa: B023
            for clients in (0, 1):
                until = time.time() + seconds
                made = pool.submit(again, lambda: completion(running, large), until if clients else 0.0, 0)
                taken = at_rate(lambda: completion(running, small), until, rate)
                row: Row = {
                    "width": width,
                    "rows a step": bound or "by time",
                    "clients of lists": clients,
                    "requests": len(taken),
                }
                row |= {"small, ms": median(taken), "99 %": float(np.percentile(taken, 99)), "worst": max(taken)}
                row["list, ms"] = median(made.result()) if clients else alone
                rows.append(row)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--engine", choices=ENGINES, default="vllm-v1")
    options.add_argument("--seconds", type=float, default=20.0, help="of each row")
    options.add_argument("--items", type=whole, default=10**6)
    options.add_argument("--lists", type=int, default=20, help="clients")
    options.add_argument("--rows", type=whole, nargs="+", help="bounds of lists' rows in a step")
    options.add_argument("--rate", type=float, default=20.0, help="with --rows: small requests a second")
    options.add_argument("--widths", type=whole, nargs="+", default=[WIDE], help="with --rows: beams of a list")
    arguments = options.parse_args()
    if arguments.rows:
        common = (arguments.engine, arguments.seconds, arguments.items)
        cells = product(arguments.widths, arguments.rows)
        found = [row for width, bound in cells for row in bounded(*common, width, bound, arguments.rate)]
        Report(arguments).add(f"{arguments.engine} rows", found)
        return
    given = (arguments.engine, arguments.seconds, arguments.items, arguments.lists)
    Report(arguments).add(arguments.engine, stalls(*given))


if __name__ == "__main__":
    main()
