"""What transformers and peft answer, computed in clean processes that know nothing of SGLang."""

import json
import os
import sys
from pathlib import Path

from support.engines.fork_server import ForkServer

_CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "PRELUDE"))}
_REFERENCE = ForkServer(
    "import peft, transformers.models.qwen2.modeling_qwen2, support.adapters.reference_answers",
    {**_CLEAN, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
)
_PROGRAM = """
import sys
from pathlib import Path
from support.adapters.reference_answers import answer_requests
answer_requests(sys.argv[1], *map(Path, sys.argv[2:]))
"""


def run_reference(model_dir: Path, requests: list[dict], folder: Path) -> list[dict]:
    """One answer for each request; `folder` is for files."""
    asked, answered = folder / "requests.json", folder / "answers.json"
    asked.write_text(json.dumps(requests, default=str))
    done = _REFERENCE.run(_PROGRAM, str(model_dir), str(asked), str(answered))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(answered.read_text())
