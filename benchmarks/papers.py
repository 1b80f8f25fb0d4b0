"""The figures of the five papers that this project builds on, measured again: docs/papers.md is made of them.

python benchmarks/papers.py [static ...] --json docs/benchmarks/papers.json

Without a name all parts run but `gap`, `seeds` and `grocery_seeds`. --quick takes the smallest sizes, to see that a
part runs.
"""

from __future__ import annotations

import importlib
import time

from runner import Report, Row, parser

PARTS = {part: f"paper_{part}" for part in ("static", "cold", "tridecode", "nezha", "tensorrt", "disc")}
PARTS["groceries"] = "paper_nezha:groceries"
# By name alone, because their models learn longer than all parts together may take.
ASKED = {part: f"paper_nezha:{part}" for part in ("gap", "seeds", "grocery_seeds")}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("parts", nargs="*", choices=[*PARTS, *ASKED, []], help="default: all but the last three")
    options.add_argument("--quick", action="store_true")
    arguments = options.parse_args()
    report, took = Report(arguments), list[Row]()
    for part in arguments.parts or PARTS:
        module, _, function = (PARTS | ASKED)[part].partition(":")
        start = time.monotonic()
        getattr(importlib.import_module(module), function or "main")(arguments, report)
        took.append({"part": part, "minutes": (time.monotonic() - start) / 60})
        print(f"{part}: {took[-1]['minutes']:.1f} minutes", flush=True)
    if not arguments.parts:
        report.add("minutes", [*took, {"part": "all", "minutes": sum(row["minutes"] for row in took)}])


if __name__ == "__main__":
    main()
