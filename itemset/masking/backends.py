"""Which kernels a device takes."""

import importlib
from types import ModuleType
from typing import Literal

Kernels = Literal["auto", "numba", "triton"]


def kernels_for(room: Literal["masking", "ranking"], device: str, choice: Kernels = "auto") -> ModuleType:
    """Return a room's kernels: Numba's on a CPU, Triton's on an accelerator, or as `choice` says.

    device: its kind, "cpu" or another. Raises ImportError without Triton where it is needed.
    """
    triton = choice == "triton" or (choice == "auto" and device != "cpu")
    return importlib.import_module(f"itemset.{room}.{'triton' if triton else 'cpu'}_kernels")
