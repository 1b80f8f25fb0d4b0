"""A card that is not there: libraries that ask for an H100 find one, until the first of its memory or launches is used.

On PYTHONPATH. PRETENDED_LIBCUDA names a libcuda with the names that vLLM's operators want (`stub_libcuda`).
"""

from __future__ import annotations

import ctypes
import os
import types

if library := os.environ.get("PRETENDED_LIBCUDA"):
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # what is loaded later finds its soname

NAME, MEMORY = "NVIDIA H100 80GB HBM3 (pretended)", 80 << 30


def _nvml(module: types.ModuleType) -> None:
    given = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index, "nvmlDeviceGetName": lambda handle: NAME,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0), "nvmlDeviceGetUUID": lambda handle: "GPU-0",
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=MEMORY),
    }  # fmt: skip
    vars(module).update(given)


def _pretend(torch: types.ModuleType) -> None:
    properties = types.SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, L2_cache_size=50 << 20
    )
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = cuda._device_count_nvml = lambda: 1
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: NAME
    cuda.get_device_properties = lambda device=None: properties
    if "PRETENDED_DEVICE" in os.environ:  # SGLang asks for more before it uses any
        cuda.current_device = lambda: 0
        cuda.set_device = lambda device: None
        cuda.mem_get_info = lambda device=None: (MEMORY, MEMORY)
    torch.accelerator.device_count = lambda: 1


try:
    import wrapt
except ImportError:  # the Python of a virtual environment's tools
    pass
else:
    wrapt.register_post_import_hook(_pretend, "torch")
    wrapt.register_post_import_hook(_nvml, "vllm.third_party.pynvml")
