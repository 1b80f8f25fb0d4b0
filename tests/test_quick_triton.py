"""Triton's interpreter as the tests have it gives what Triton's own gives."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from devices import DEVICE


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nothing is interpreted")
def test_operations_on_all_types() -> None:
    import mixed_types

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TRITON_INTERPRET": "1"}
    command = [sys.executable, mixed_types.__file__]
    own = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert mixed_types.results() == own.stdout.splitlines()
