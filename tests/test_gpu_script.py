"""`benchmarks/gpu.sh` on a machine with a GPU and little else: what it imports, measures and keeps when steps fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from engines import environment as of_engines

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_engine  # noqa: E402

PACKED, PACKED_SGLANG = ROOT / ".gpu", ROOT / ".gpu-sglang"
BARE = ROOT / ".venv-gpu" / "bin" / "python"  # what `gpu_pack.py --environment` installs
ON_A_BARE_MACHINE = pytest.mark.skipif(
    not (BARE.exists() and (PACKED / "sizes.json").exists()),
    reason="needs .venv-gpu and .gpu, which benchmarks/gpu_pack.py makes: 7 GB of packages",
)
WITH_SGLANG = pytest.mark.skipif(
    not (BARE.exists() and (PACKED_SGLANG / "sizes.json").exists()),
    reason="needs .venv-gpu and .gpu-sglang, which benchmarks/gpu_pack_sglang.py makes",
)

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("msgspec", "duckdb", "tqdm", "transformers", "vllm", "sglang", "xgrammar"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import gpu_checks, gpu_golden, gpu_micro, gpu_peers, gpu_steps, gpu_tasks
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


def test_the_program_itself_needs_only_python() -> None:
    run = subprocess.run([sys.executable, "-S", BENCHMARKS / "gpu.py"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "there is no NVIDIA GPU here (no /dev/nvidiactl): see --interpret\n"


STEPS = {
    "facts": 'print(\'{"machine": "H100"}\')',
    "smoke": 'print(\'{"ok": false, "differ": 3}\')',
    "cells": "print('{\"row\": 1}', flush=True); raise ValueError('no such kernel')",
    "rounds": """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"child": %d}' % child.pid, flush=True)
time.sleep(600)
""",
    "large": "print('beside rows'); print('{\"row\": 2}')",
    "ncu": """print('==PROF== 1')
print('"ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"')
print('"0","_mask_kernel","(3, 1, 1)","gpu__time_duration.sum","us","5.5"')
print('"0","_mask_kernel","(3, 1, 1)","dram__bytes_read.sum","byte","512"')""",
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu.Results:
    monkeypatch.setattr(gpu, "command_of", lambda step: [sys.executable, "-c", STEPS[step]])
    monkeypatch.setattr(gpu, "LIMITS", gpu.LIMITS | {"rounds": 3})
    return gpu.Results(tmp_path / "out" / "gpu.json", {"kernels": "these"})


def test_a_step_that_fails_or_hangs_ends_no_other_and_leaves_nothing(results: gpu.Results) -> None:
    assert not gpu.run(list(STEPS), results, 400, dict(os.environ))
    found = json.loads(results.path.read_text())["gpu"]
    rows = [{name: value for name, value in row.items() if name != "seconds of step"} for row in found["rows"]]
    child = next(row["child"] for row in rows if "child" in row)
    assert [row for row in rows if len(row) > 1] == [
        {"step": "facts", "machine": "H100"},
        {"step": "smoke", "ok": False, "differ": 3},
        {"step": "cells", "row": 1},
        {"step": "cells", "failed": "ended with status 1: ValueError: no such kernel"},
        {"step": "rounds", "child": child},
        {"step": "rounds", "failed": "not done in 3 s, and ended"},
        {"step": "large", "row": 2},
        {
            "step": "ncu", "kernel": "_mask_kernel", "grid": "(3, 1, 1)", "gpu__time_duration.sum, us": "5.5",
            "dram__bytes_read.sum, byte": "512",
        },
    ]  # fmt: skip
    assert found["machine"] == "H100"
    lines = results.path.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == found["rows"]
    assert "beside rows" in results.path.with_suffix(".log").read_text()
    for _ in range(100):  # what the step had started shares the card with no other
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {child} is still there")


def test_a_step_is_done_once_with_the_same_kernels_unless_it_failed(results: gpu.Results) -> None:
    gpu.run(list(STEPS), results, 400, dict(os.environ))
    assert gpu.steps_done([results.path, results.path.with_name("none.json")], "these") == {
        "facts", "smoke", "large", "ncu",
    }  # fmt: skip
    assert gpu.steps_done([results.path], "others") == set()


def test_nothing_begins_that_the_time_does_not_reach(results: gpu.Results) -> None:
    gpu.run(["large", "ncu"], results, 58, dict(os.environ))
    assert [row for row in results.rows if "skipped" in row] == []
    gpu.run(["large"], results, 20, dict(os.environ))
    assert results.rows[-1] == {"step": "large", "skipped": "20 s are left, and it may take 40"}


def test_all_steps_together_take_less_than_fourteen_minutes() -> None:
    assert sum(gpu.LIMITS[step] for step in gpu.LIMITS if step not in gpu.SGLANG | gpu.LATER) < 14 * 60
    assert sum(gpu.SGLANG.values()) < 5 * 60
    first = ("facts", "smoke", "engine")  # of the first call; it unpacks beside the first two
    assert list(gpu.LIMITS)[:4] == ["facts", "smoke", "unpack", "engine"]
    assert sum(gpu.LIMITS[step] for step in first) < 330


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "golden.pt"
    command = [sys.executable, str(BENCHMARKS / "gpu_golden.py"), "record", str(path), "few"]
    given = gpu_engine.environment() | {"NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR", "")}
    subprocess.run(command, check=True, env=given, timeout=400)
    return path


def test_golden_calls_hold_in_the_interpreter_and_a_difference_is_a_row(golden: Path, tmp_path: Path) -> None:
    import gpu_golden

    rows: list[dict[str, Any]] = []
    gpu_golden.replay(golden, "cpu", rows.append, graph=False, every=2)
    assert {row["kernel"] for row in rows} == {
        "walk", "mask", "forced", "advance", "log_sums", "legal_sums", "ended", "best", "follow", "merge",
        "add_own",
    }  # fmt: skip
    assert [row for row in rows if not row["ok"]] == []
    calls = gpu_golden.load(golden)
    walk, forced = (next(call for call in calls if call["name"] == name) for name in ("walk", "forced"))
    walk["made"][3][0] += 1  # another state
    forced["given"] = forced["given"][:2]  # an error
    gpu_golden.save([walk, forced, calls[-1]], tmp_path / "wrong.pt")
    rows.clear()
    gpu_golden.replay(tmp_path / "wrong.pt", "cpu", rows.append, graph=False)
    assert [(row["kernel"], row["ok"], row["differ"]) for row in rows] == [
        ("walk", False, 1), ("forced", False, 0), ("add_own", True, 0),
    ]  # fmt: skip
    assert "TypeError" in rows[1]["failed"]


def test_the_engine_step_measures_every_way(tmp_path: Path) -> None:
    """With a tiny model on a CPU: what is switched on a GPU is switched here, and each way has its row."""
    given = of_engines("v2") | {"STATIC_GPU_HOME": str(tmp_path), "STATIC_GPU_TINY": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    script = str(BENCHMARKS / "gpu_engine.py")
    subprocess.run([sys.executable, script, "sets"], check=True, env=given, timeout=300)
    run = subprocess.run([sys.executable, script, "measure"], capture_output=True, text=True, env=given, timeout=600)
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"way"')]
    ways = ["start", "none", "device", "narrow", "children", "narrow, children", "host", "list", "list", "trials"]
    assert [row["way"] for row in rows] == ways, run.stderr[-3000:]
    assert [row for row in rows if "failed" in row or row.get("illegal")] == []
    steps = {row["way"]: row["steps"] for row in rows if "steps" in row}
    assert set(steps["device"]) == {"not chosen"}
    assert steps["narrow"]["narrow"] > 0
    assert steps["host"] == {}  # no step of the device path
    lists, without_end, trials = rows[-3:]
    assert without_end["passes inside a step"] == lists["passes inside a step"] - 1
    assert [trials[way] for way in ways[2:7]] == [trials["of"]] * 5  # but for rounding, of which floats have little
    assert trials["items of a list"] == trials["as its passes"] == 4
    assert trials["largest difference of scores"] < 1e-3  # whose items are others: these weights make all alike
    assert (lists["items"], lists["distinct"], lists["passes inside a step"] > 0) == (4, 4, True)
    states = subprocess.run([sys.executable, script, "measure_states"], capture_output=True, text=True, env=given)
    rows = [json.loads(line) for line in states.stdout.splitlines() if line.startswith('{"way"')]
    assert [row["way"] for row in rows] == ["start", "list", "rounds"], states.stderr[-3000:]
    assert (rows[1]["items"], rows[1]["passes inside a step"] > 0, rows[2]["in common with rounds"]) == (4, True, 1)


def test_an_engine_that_ends_says_why_and_the_next_one_is_tried(tmp_path: Path) -> None:
    """SGLang's scheduler ends the whole group of processes with it: what is left is a log."""
    import gpu_sglang

    log = """[2026-11-27 20:00:07] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 6368, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args)
Exception: Capture cuda graph failed: no kernel image
Possible solutions:
1. set --mem-fraction-static to a smaller value

[2026-11-27 20:00:07] Received sigquit from a child process. It usually means the child failed.
RuntimeError: Rank 0 scheduler died during initialization (exit code: -3).
"""
    why = gpu_sglang._why(log)
    assert why.startswith("Exception: Capture cuda graph failed: no kernel image")
    assert len(gpu_sglang._why("ValueError: " + 1_000 * "x")) == 300
    assert gpu_sglang._why("killed") == "killed"


@ON_A_BARE_MACHINE
def test_the_pack_is_small_enough_to_be_carried() -> None:
    from gpu_pack import MOST_BYTES

    sizes = json.loads((PACKED / "sizes.json").read_text())
    assert {"python.tar.xz", "golden.pt", "triton.tar.xz", "_vllm_fa3_C.tar.xz"} <= sizes.keys()
    assert sum(sizes.values()) <= MOST_BYTES


def pretended(home: Path) -> dict[str, str]:
    """The environment of a machine where the libraries that ask for a card find a pretended one."""
    from gpu_pack import pretended_libcuda

    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "STATIC_GPU_HOME": str(home / "unpacked"), "PRETENDED_LIBCUDA": str(pretended_libcuda(home)),
        "OUT": str(home), "PYTHONPATH": str(Path(__file__).parent / "pretended_card"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the first call's steps run with."""
    given = pretended(tmp_path_factory.mktemp("bare"))
    command = [str(BARE), str(BENCHMARKS / "gpu_engine.py"), "unpack", str(PACKED)]
    subprocess.run(command, check=True, env=given, timeout=500)
    return given


@ON_A_BARE_MACHINE
def test_the_first_call_gets_as_far_as_the_device(bare: dict[str, str]) -> None:
    """With exactly the versions of such a machine, the real vLLM and its own operators: every step ends with the
    question for a driver, and none before."""
    command = [
        str(BARE),
        str(BENCHMARKS / "gpu.py"),
        "--seconds",
        "330",
        "--again",
        "facts",
        "smoke",
        "engine",
        "cells",
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=bare, timeout=500)
    rows = json.loads(Path(bare["OUT"], "gpu.json").read_text())["gpu"]["rows"]
    failed = {row["step"]: row["failed"] for row in rows if "failed" in row}
    assert set(failed) == {"facts", "smoke", "engine", "cells"}, (rows, run.stderr[-2000:])
    for step, why in failed.items():
        assert "NVIDIA" in why, (step, why)


@ON_A_BARE_MACHINE
def test_the_carried_operators_register(bare: dict[str, str]) -> None:
    """All that Qwen3 needs is among them."""
    from gpu_pack import LIBRARIES, OPERATORS

    script = (
        "import torch, sys, json\nimport vllm.platforms.cuda\n"
        f"for name in {[name for name in LIBRARIES if 'fa3' not in name]!r}: __import__('vllm.' + name)\n"
        "import vllm.vllm_flash_attn._vllm_fa3_C\n"
        "names = torch._C._dispatch_get_all_op_names()\n"
        f"found = {{one: sum(name.startswith(one + '::') for name in set(names)) for one in {list(OPERATORS)!r}}}\n"
        "print(json.dumps(found))"
    )
    site = Path(bare["STATIC_GPU_HOME"], "site")
    given = bare | {"PYTHONPATH": f"{site}:{bare['PYTHONPATH']}"}
    run = subprocess.run([str(BARE), "-c", script], capture_output=True, text=True, env=given, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert {name: found[name] >= least for name, least in OPERATORS.items()} == dict.fromkeys(OPERATORS, True), found


@WITH_SGLANG
def test_sglang_gets_as_far_as_the_device(tmp_path: Path) -> None:
    """Unpacked, seeded with its kernels, and started: all that it imports for CUDA is there, and its scheduler asks for
    a GPU."""
    import gpu_pack_sglang

    sizes = json.loads((PACKED_SGLANG / "sizes.json").read_text())
    assert {"python.tar.xz", "common_ops.tar.xz", "jit.tar.xz", "triton.tar.xz"} <= sizes.keys()
    assert sum(sizes.values()) <= gpu_pack_sglang.MOST_BYTES
    given = pretended(tmp_path) | {"PRETENDED_DEVICE": "1"}
    command = [str(BARE), str(BENCHMARKS / "gpu.py"), "--seconds", "400", "--again", "sglang_unpack", "sglang"]
    run = subprocess.run(command, capture_output=True, text=True, env=given, timeout=500)
    rows = json.loads(Path(given["OUT"], "gpu.json").read_text())["gpu"]["rows"]
    seeds = [row for row in rows if row.get("way") == "seed"]
    assert seeds, run.stderr[-2000:]
    assert [row for row in seeds if "failed" in row] == []
    first = next(row for row in rows if row.get("way") == "start")
    assert first["failed"] == "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!"
    site = Path(f"{given['STATIC_GPU_HOME']}_sglang", "site")
    script = (
        "import torch, sgl_kernel\nfrom sgl_kernel import fused_add_rmsnorm, rmsnorm\n"
        "from sglang.srt.models.qwen3 import Qwen3ForCausalLM\n"
        "from sglang.srt.layers.attention import torch_native_backend, triton_backend\n"
        "from sglang.kernels.ops.attention import decode_attention, extend_attention\n"  # imported when called
        "print(sum(name.startswith('sgl_kernel::') for name in set(torch._C._dispatch_get_all_op_names())))"
    )
    given |= {"PYTHONPATH": f"{site}:{given['PYTHONPATH']}"}
    run = subprocess.run([str(BARE), "-c", script], capture_output=True, text=True, env=given, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout.splitlines()[-1]) >= gpu_pack_sglang.OPERATORS
