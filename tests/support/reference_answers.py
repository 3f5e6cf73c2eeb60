"""What transformers and peft answer, computed in a clean process that knows nothing of SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def run_reference(model_dir: Path, requests: list[dict], folder: Path) -> list[dict]:
    """Answers of transformers and peft, computed in a clean process that knows nothing of SGLang."""
    asked, answered = folder / "requests.json", folder / "answers.json"
    asked.write_text(json.dumps(requests, default=str))
    command = [sys.executable, "-m", "adapters.verification.reference", "--model", str(model_dir)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "PRELUDE"))}
    clean["OMP_NUM_THREADS"] = "2"  # more only wait for each other where the model is this small
    subprocess.run([*command, "--requests", str(asked), "--out", str(answered)], check=True, env=clean)
    return json.loads(answered.read_text())
