"""`benchmarks/gpu.sh` on a machine with a GPU and little else: what it imports; that no part ends another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("msgspec", "duckdb", "tqdm", "transformers", "vllm", "sglang", "xgrammar"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import gpu_checks, gpu_engine, gpu_micro, gpu_peers, gpu_steps
import itemset.masking.slots, itemset.masking.triton_kernels
from itemset.masking.arena import Arena, room_for
items = itemset.build([[5, 6, 7], [5, 9]])
print(Arena(room_for(items)).acquire(items), len(items))
"""


def test_the_kernels_need_no_engine_and_few_packages() -> None:
    path = os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent)))
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=300, env=environment)
    assert (run.stdout, run.returncode) == ("0 2\n", 0), run.stderr[-2000:]


def some_part(part: str, options: gpu.Options, emit: gpu.Emit) -> None:
    emit("machine", {"device": options.device})
    emit("A", {"row": part})
    if part == "fails":
        raise AssertionError("row 3 differs\nin more than a line")
    if part == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if part == "hangs":
        time.sleep(600)
    emit("A", {"row": f"{part}, again"})


def test_a_part_that_fails_ends_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    saved: list[Any] = []
    parts = {"fails": 5.0, "crashes": 5.0, "hangs": 0.2, "works": 5.0}
    report = gpu.run_parts(parts, some_part, gpu.Options("cpu"), lambda report: saved.append(len(report["A"])))
    assert [row["row"] for row in report["A"]] == [*parts, "works, again"]
    assert report["failed"] == {
        "fails": "AssertionError: row 3 differs",
        "crashes": "its process ended with status -11",
        "hangs": "took more than 0.2 minutes, and was ended",
    }
    assert sorted(set(saved)) == [0, 1, 2, 3, 4, 5]  # after every row, not at the end
    assert "in more than a line" in capfd.readouterr().err


def test_nothing_begins_when_the_time_is_up() -> None:
    report = gpu.run_parts({"works": 5.0}, some_part, gpu.Options("cpu", deadline=time.time()), lambda report: None)
    assert (report["skipped"], report["A"], report["failed"]) == ([{"part": "works"}], [], {})


@pytest.mark.parametrize("first", gpu.FIRST)
def test_each_command_for_a_bare_machine_gets_as_far_as_the_device(
    first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--first", first])
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        "there is no CUDA GPU here: see --interpret and --compile\n",
    )
    assert sum(gpu.FIRST[first].values()) < 10  # minutes that a command may take there


def test_what_is_missing_is_said_before_anything_is_imported() -> None:
    run = subprocess.run([sys.executable, "-S", BENCHMARKS / "gpu.py"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (2, "")
    assert "pip install torch triton numpy numba pyarrow" in run.stderr
