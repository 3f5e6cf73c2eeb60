"""The kernel that joins gate's and up's expand step with SiLU, interpreted on a CPU; compiled on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_against_the_formula():
    script = Path(__file__).with_name("gate_up_cases.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
