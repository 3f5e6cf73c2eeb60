"""`python -m router.main --config cluster.yaml`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from adapters.errors import AdapterError
from cluster import log
from cluster.config_file import load_cluster_config
from cluster.errors import ConfigError
from router.server import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="router", description="The HTTP front of a Prelude cluster.")
    parser.add_argument("--config", type=Path, required=True, help="cluster.yaml")
    try:
        config = load_cluster_config(parser.parse_args().config)
        log.setup("router", config.log_level)
        run(config)
    except (ConfigError, AdapterError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
