"""Other plugins of vLLM beside ours, really installed, that patch the functions that it hooks: before it, and after."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

PLUGIN = """
import functools

def register():
    from vllm import LLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor
    for owner, name in ((LLM, "beam_search"), (LLM, "generate"), (InputProcessor, "process_inputs"),
                        (OutputProcessor, "add_request")):
        own = getattr(owner, name)
        setattr(owner, name, functools.wraps(own)(lambda *args, _own=own, **kwargs: _own(*args, **kwargs)))
"""
ASKED = """
from vllm import LLM
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
for function in (LLM.beam_search, LLM.generate, InputProcessor.process_inputs, OutputProcessor.add_request):
    files = []
    while function is not None:
        files.append(function.__code__.co_filename.rpartition("/")[2])
        function = getattr(function, "__wrapped__", None)
    print("FOUND", *files)
"""


@pytest.mark.parametrize("first", ["other", "static"])
def test_both_run(first: str, tmp_path: Path) -> None:
    """Whichever is loaded first: what runs ours is on the way from the name that people call to vLLM's own function."""
    (tmp_path / "other_plugin.py").write_text(PLUGIN)
    info = tmp_path / "other_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nother = other_plugin:register\n")
    paths = [str(tmp_path), str(Path(__file__).parents[1])]
    if first == "static":
        own = tmp_path / "first" / "static_backend-0.1.0.dist-info"
        own.mkdir(parents=True)
        for name in ("METADATA", "entry_points.txt"):
            (own / name).write_text(str(distribution("static-backend").read_text(name)))
        paths.insert(0, str(own.parent))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True, timeout=300)
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert len(found) == 4, done.stderr
    for files in found:
        assert {"other_plugin.py", "hooks.py"} <= set(files)
