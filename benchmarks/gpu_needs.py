"""Says at once what a benchmark on the GPU lacks: python benchmarks/gpu_needs.py vllm xgrammar ... --plugin GROUP"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path


def lacking(packages: list[str], plugin: str | None = None, *, gpu: bool = False) -> list[str]:
    """What is missing, each with what to do about it. Imports none of it.

    plugin: the entry-point group in which this project must be installed. gpu: whether there must be one, by its
    driver's device file.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    found = [f"missing here: {', '.join(missing)}. pip install {' '.join(missing)}"] if missing else []
    if plugin and not entry_points(group=plugin, name="static"):
        found.append("this project is not installed here. pip install --no-deps . (in its folder)")
    if gpu and not Path("/dev/nvidiactl").exists():
        found.append("there is no NVIDIA GPU here (no /dev/nvidiactl)")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--plugin")
    args = parser.parse_args()
    for sentence in (sentences := lacking(args.packages, args.plugin, gpu=True)):
        print(sentence, file=sys.stderr)
    sys.exit(2 if sentences else 0)
