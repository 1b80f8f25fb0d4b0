"""What may follow: on the host, and on a device."""

from typing import Literal

Kernels = Literal["auto", "numba", "triton"]  # here, for configurations: to import it loads nothing else
