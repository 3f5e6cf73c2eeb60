"""Starts one SGLang server: `python -m engine.launch <SGLang arguments>`.

SGLang spawns its schedulers, and each imports this module before anything else. Code at module level here therefore
runs first in every process of the engine.
"""

import gc
import os
import sys

from engine.hooks.report import DEVICE_VARIABLE, ROLE_VARIABLE, report
from process.lifetime import die_with_parent

if os.environ.get(DEVICE_VARIABLE) == "cpu":
    from engine import cpu_support

    cpu_support.install()


def main(argv: list[str]) -> None:
    """Serve until stopped. Exits at once if the plugin did not run in this process."""
    die_with_parent()
    gc.disable()  # the garbage collector would take a quarter of the imports' time; what they make stays
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    gc.freeze()
    gc.enable()
    if not report().hooks:
        sys.exit(f"the prelude plugin did not run (role {os.environ[ROLE_VARIABLE]}); is the package installed?")
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
