"""Reads `cluster.yaml`. Every error names the file, the line and what would be valid."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.config.problems import in_words
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError


def load_cluster_config(path: Path) -> ClusterConfig:
    """The validated configuration, with relative paths resolved against the file's folder. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; `prelude init` writes one, --config names another") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        _check_nodes(path, root)
        data = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: is not YAML: {getattr(error, 'problem', error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: cannot be read: its sections are nested too deeply") from error
    if root is None or not isinstance(data, dict):
        raise ConfigError(f"{path}:1: expected a mapping with `model` and `workers`, found {type(data).__name__}")
    folder = path.resolve().parent
    if "?" in str(folder):
        raise ConfigError(f"{path}: the path of its folder has a ?, where the URL of a catalog would end; rename it")
    try:
        config = ClusterConfig.model_validate(data, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(path, root, problem) for problem in error.errors())) from error
    return config.with_default_places(folder / ".prelude")


class _Loader(yaml.SafeLoader):
    """Says of which value it failed to make the number, date or truth value that it looks like, or is tagged as."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError) as error:
            what = f"{node.value} is no {node.tag.rpartition(':')[2]} ({error}); quote it if it is text"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from error


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Inside, a ConfigError with a `location` gets the file and the line of it."""
    try:
        yield
    except ConfigError as error:
        if not error.location:
            raise
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        assert root is not None
        name = ".".join(map(str, error.location))
        raise ConfigError(f"{path}:{_line_of(root, error.location)}: {name}: {error}") from error


def dump_cluster_config(config: ClusterConfig, path: Path) -> None:
    """Write a configuration, which `load_cluster_config` reads back unchanged."""
    data = config.model_dump(mode="json")
    if "host_bytes" not in config.residency.model_fields_set:  # a given one must fit, the default is lowered
        del data["residency"]["host_bytes"]
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def _describe(path: Path, root: yaml.Node, problem) -> str:
    location = tuple(part for part in problem["loc"] if part != "[key]")
    line = _line_of(root, location)
    name = ".".join(str(part) for part in location) or "the file"
    return f"{path}:{line}: {name}: {in_words(problem, ClusterConfig)}"


def _line_of(node: yaml.Node, location: tuple) -> int:
    """Line of the deepest node on the path `location` that exists in the file."""
    line = node.start_mark.line
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == str(part)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        else:
            break
    return line + 1


def _check_nodes(path: Path, root: yaml.Node | None) -> None:
    """Refuse what no field takes, and the same key twice. Looks at each node once, also one with aliases."""
    opened: set[int] = set()
    checked: set[int] = set()

    def at(node: yaml.Node) -> str:
        return f"{path}:{node.start_mark.line + 1}"

    def check(node: yaml.Node | None) -> None:
        if isinstance(node, yaml.ScalarNode) and not re.sub(r"[\n\t]", "", node.value).isprintable():
            raise ConfigError(f"{at(node)}: {node.value!a} has an invisible character; remove it")
        if not isinstance(node, yaml.CollectionNode) or id(node) in checked:
            return
        if id(node) in opened:
            raise ConfigError(f"{at(node)}: this section contains itself")
        opened.add(id(node))
        seen: dict[str, int] = {}
        for item in node.value:
            if isinstance(node, yaml.MappingNode):
                key, item = item
                if not isinstance(key, yaml.ScalarNode):
                    raise ConfigError(f"{at(key)}: a key is {{…}} or […]; put what begins with a bracket into quotes")
                if key.value in seen:
                    raise ConfigError(f"{at(key)}: {key.value} was given before, on line {seen[key.value]}")
                check(key)
                seen[key.value] = key.start_mark.line + 1
            check(item)
        checked.add(id(node))

    check(root)
