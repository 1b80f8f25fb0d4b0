"""SGLang's step of `benchmarks/gpu.sh`: with a tiny model on a CPU, and on a machine with a GPU and little else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sglang_engines import environment

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "benchmarks" / "gpu_sglang.py")


def test_the_engine_step_measures_every_way(tmp_path: Path) -> None:
    """The requests of the GPU run: every configuration reports a row, takes its path, and returns legal items only."""
    given = environment() | {"STATIC_GPU_HOME": str(tmp_path), "STATIC_GPU_TINY": "1", "TESTS_SGLANG_REPORTS": "0"}
    subprocess.run([sys.executable, SCRIPT, "sets"], check=True, env=given, timeout=300)
    run = subprocess.run([sys.executable, SCRIPT, "measure"], capture_output=True, text=True, env=given, timeout=600)
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"way"')]
    ways = ["start", "none", "device", "host", "greedy", "list", "list", "draws", "graphs", "end"]
    assert [row["way"] for row in rows] == ways, run.stderr[-3000:]
    assert run.returncode == 0
    assert [row for row in rows if "failed" in row or row.get("illegal")] == []
    none, device, host, greedy, inside, rounds, draws, graphs = rows[1:-1]
    shares = [(row["share of a path"]["device"], row["share of a path"]["host"]) for row in (none, device, host)]
    assert shares == [(0, 0), (1, 0), (0, 1)]
    assert all(row["steps"] > 0 and row["ms a step"] > 0 for row in (none, device, host))
    assert device["answers"] == host["answers"] == 3 * device["rows"]
    assert greedy["same"] == greedy["of"] == 4
    assert (inside["made"], rounds["made"]) == ("in a step", "by rounds")
    assert inside["items"] == inside["distinct"] == rounds["items"] == rounds["distinct"] == 4
    assert (inside["steps of beams"] > 0, rounds["steps of beams"]) == (True, 0)
    assert (draws["items"], draws["exact"]) == (2, True)
    assert (graphs["captured"], graphs["by a graph"]) == ([], 0)  # there is no GPU
    assert graphs["rows on the device path"] > 0
    assert graphs["rows on the host path"] > 0
