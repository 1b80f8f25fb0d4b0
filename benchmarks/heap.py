"""What glibc's heap of a vLLM worker holds, in use and free, and what of the free part it can give back.

Mixed into vLLM's worker: `--worker-extension-cls heap.Heap` with this folder on PYTHONPATH.
"""

from __future__ import annotations

import ctypes

FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class Heap:
    def heap_in_mib(self) -> dict[str, int]:
        """MiB of small and middling blocks in use, and of those that are free and not given back."""

        class Counts(ctypes.Structure):  # mallinfo2(3)
            _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]

        library = ctypes.CDLL("libc.so.6")
        library.mallinfo2.restype = Counts
        counts = library.mallinfo2()
        return {"used": counts.uordblks >> 20, "free": counts.fordblks >> 20}
