"""Optional features are taken out by deleting their files: the engine starts without them, and masks as ever."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from engines import FAST, TESTS, environment

import itemset

ROOT = TESTS.parent
FEATURES = {
    "lists": [
        "core/lists", "worker/beam_attention", "worker/beam_forward", "worker/beam_kv", "worker/beam_states",
        "worker/list_graphs", "worker/list_hooks", "worker/lists", "worker/passes", "worker/triton_attention",
    ],
    "thoughts": ["core/thoughts"],
    "weights": ["worker/weights"],
    "draft head": ["core/draft_head", "front/draft_head"],
    "speculation": ["worker/drafts"],
    "children": ["worker/child_sampling", "worker/triton_child_sampling"],
}  # fmt: skip
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
import vllm_static

model, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sets = {"item_sets": {"films": f"{folder}/films.itemset"}, "item_set_kernels": "numba"}
llm = LLM(model, structured_outputs_config={"backend": "static"}, additional_config=sets, **options)
params = SamplingParams(max_tokens=8, seed=3, extra_args={"item_set": "films"})
print(json.dumps([vllm_static.__file__, *[list(one.outputs[0].token_ids) for one in llm.generate(["a", "b"], params)]]))
"""


def test_an_engine_starts_without_any_optional_feature(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "vllm_static", tmp_path / "vllm_static", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "itemset").symlink_to(ROOT / "itemset")
    for name in [name for files in FEATURES.values() for name in files]:
        (tmp_path / "vllm_static" / f"{name}.py").unlink()
    films = itemset.build([[105, 106, 107], [105, 108], [110, 111]])
    films.save(tmp_path / "films.itemset")
    given = environment("v2")
    given["PYTHONPATH"] = os.pathsep.join([str(tmp_path), given["PYTHONPATH"]])
    command = [sys.executable, "-c", SCRIPT, str(tiny_model), str(tmp_path), json.dumps(FAST)]
    run = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-6000:]
    imported, *answers = json.loads(run.stdout.splitlines()[-1])
    assert imported.startswith(str(tmp_path))
    assert [films.lookup([answer[:-1]]).tolist() for answer in answers]  # raises for what is no item
