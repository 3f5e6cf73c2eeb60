"""Which options a user has given: commands refuse those that would have no effect."""

from __future__ import annotations

import argparse


def given_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    """The names of the parser's arguments whose values are not their defaults, in its order."""
    defaults = vars(parser.parse_args([]))
    return [name for name, value in vars(arguments).items() if name in defaults and value != defaults[name]]
