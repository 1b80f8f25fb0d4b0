"""Where the kernels are tested: on a GPU where there is one, else on the CPU with Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import runpy
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ["numba", "triton"] if DEVICE == "cpu" else ["triton"]

# Tests run side by side, on as many cores: more threads for each would wait for one another.
torch.set_num_threads(1)

if DEVICE == "cpu" and importlib.util.find_spec("triton") is not None:
    # Triton looks at this when it is imported. Engines get their own value (engines.environment).
    os.environ["TRITON_INTERPRET"] = "1"
    runpy.run_path(str(Path(__file__).parent / "interpreter" / "sitecustomize.py"))
