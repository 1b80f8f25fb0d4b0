"""Lists a second over latency, from what `itemset bench --json FILE` has written. Needs matplotlib.

python benchmarks/bench_plot.py bench.json -o bench.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="+", help="one or several, of several servers")
    parser.add_argument("-o", "--output", required=True)
    arguments = parser.parse_args()
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for file in arguments.file:
        rows = json.loads(file.read_text())["rows"]
        for label, filtered in dict.fromkeys((row["body"], row["filter"]) for row in rows):
            mine = [row for row in rows if (row["body"], row["filter"]) == (label, filtered)]
            name = f"{label}{', filtered' if filtered else ''}: {mine[0]['legal']:.0%} legal"
            axes.plot([row["p50 ms"] for row in mine], [row["lists a second"] for row in mine], marker="o", label=name)
    axes.set(xlabel="median latency, ms", ylabel="lists a second")
    axes.legend()
    figure.savefig(arguments.output)


if __name__ == "__main__":
    main()
