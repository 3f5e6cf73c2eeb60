"""Which options a user has given: they replace a benchmark's own, and commands refuse those without effect."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def with_given(options: Options, arguments: argparse.Namespace) -> Options:
    """The options with what the command line says: arguments are named, or have a `dest`, as their fields are."""
    given = {field.name: getattr(arguments, field.name, None) for field in fields(options)}
    return replace(options, **{name: value for name, value in given.items() if value is not None})


def given_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    """The names of the parser's arguments whose values are not their defaults, in its order."""
    defaults = vars(parser.parse_args([]))
    return [name for name, value in vars(arguments).items() if name in defaults and value != defaults[name]]
