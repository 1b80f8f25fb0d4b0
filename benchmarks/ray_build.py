"""Builds an index on a Ray cluster of two nodes, one of which dies in the middle: the same bytes must come out.

python benchmarks/ray_build.py        in an environment with the extra `ray`

Both nodes are Ray's own processes on this machine, with a core and an object store of 300 MB each. The first one has
the cluster's bookkeeping; the second one dies by SIGKILL, in the middle of reading and encoding, or when some of the
shards are written. A folder of CSV parts of texts, with keys, an attribute and equal items, is built by `itemset build`
alone and with `--engine ray`. Prints a row of a table for each build, and ends with 1 if an index differs.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
WORDS = [a + b for a in ("ka", "li", "mo", "ne", "pu", "ra", "si", "to") for b in ("bar", "den", "fin", "gol", "han")]
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 300 << 20}
COLUMNS = ["--column", "title", "--key", "sku", "--attribute", "shelf"]


def write_parts(folder: Path, items: int) -> None:
    """Four parts of different sizes; one item in twenty is equal to another."""
    draw, part, number = random.Random(1), 0, 0
    titles: list[str] = []
    for part, share in enumerate((0.1, 0.2, 0.3, 0.4)):
        with open(folder / f"part-{part}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["title", "sku", "shelf"])
            for _ in range(int(items * share)):
                again = titles and draw.random() < 0.05
                title = draw.choice(titles) if again else " ".join(draw.choices(WORDS, k=draw.randint(3, 9)))
                titles.append(title)
                rows.writerow([title, f"sku-{number}", draw.randrange(40)])
                number += 1


def build(source: Path, output: Path, *more: str, address: str = "") -> subprocess.Popen[str]:
    from models import cached_tiny_llama

    options = [*COLUMNS, "--tokenizer", str(cached_tiny_llama()), *more]
    command = [sys.executable, "-m", "itemset", "build", str(source), *options, "-o", str(output)]
    env = {**os.environ, "RAY_ADDRESS": address, "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_of(process: subprocess.Popen[str], start: float) -> tuple[float, str]:
    out, log = process.communicate()
    if process.returncode:
        sys.exit(f"the build ended with {process.returncode}:\n{log[-2000:]}")
    (items,) = re.findall(r"^keys +([\d,]+)", out, re.MULTILINE)
    return time.perf_counter() - start, items


def on_a_cluster(source: Path, folder: Path, seconds: float = 0, shards: float = 0) -> tuple[float, int, int]:
    """Build on two nodes; the second one dies after so many seconds or when so many shards are written, 0 for never.

    Returns the time, the shards at its death, and those at the end.
    """
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        second = cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        written, start = folder / "shards", time.perf_counter()
        more = ("--engine", "ray", "--shards", str(written))
        process = build(source, folder / "ray.itemset", *more, address=cluster.address)
        seen = 0
        if seconds or shards:
            while time.perf_counter() - start < seconds or seen < shards:
                if process.poll() is not None:
                    sys.exit("the build ended before the node did: give it more items")
                time.sleep(0.02)
                seen = len(list(written.glob("0*.parquet")))
            cluster.remove_node(second, allow_graceful=False)
        took = end_of(process, start)[0]
        return took, seen, len(list(written.glob("0*.parquet")))
    finally:
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200_000)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # of all below
    print("| build | seconds | shards, and how many were written at the death | |\n|---|--:|--:|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "parts")
        source.mkdir()
        write_parts(source, given.items)
        alone = Path(name, "alone.itemset")
        took, keys = end_of(build(source, alone), time.perf_counter())
        print(f"| one process | {took:.0f} | | {keys} keys |", flush=True)
        whole, shards = run("two nodes", source, alone)
        run("one dies while they read and encode", source, alone, seconds=whole / 3)
        for part in (4, 2):
            run("one dies while they write", source, alone, shards=max(1, shards // part))


def run(what: str, source: Path, alone: Path, **death: float) -> tuple[float, int]:
    """Build on two nodes, and print a row of the table. Returns the time and the number of shards."""
    with tempfile.TemporaryDirectory(dir=alone.parent) as folder:
        took, seen, shards = on_a_cluster(source, Path(folder), **death)
        same = Path(folder, "ray.itemset").read_bytes() == alone.read_bytes()
    outcome = "the same bytes" if same else "OTHER BYTES"
    print(f"| {what} | {took:.0f} | {f'{seen} of ' if death else ''}{shards} | {outcome} |", flush=True)
    if not same:
        sys.exit(1)
    return took, shards


if __name__ == "__main__":
    main()
