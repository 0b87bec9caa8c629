"""Reads the text that describes an experiment; what is wrong is named with its line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml
from pydantic import ValidationError

from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.experiment_errors import ExperimentError, PlanError

Place = tuple[int | str, ...]


def read_config(path: Path) -> ExperimentConfig:
    """The experiment that a file describes.

    Raises:
        ExperimentError: the file can not be read, or its text is refused as by `parse_config`.
    """
    return parse_config(read_text(path), str(path))


def read_text(path: Path) -> str:
    """A file's text. Raises ExperimentError: it can not be read, or is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ExperimentError(f"{path}: can not be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ExperimentError(f"{path}: is not UTF-8 text") from None


def parse_config(text: str, source: str) -> ExperimentConfig:
    """The experiment that a text in YAML (or JSON) describes. source: what the text is called in errors.

    Raises:
        PlanError: a field is unknown, missing or out of range; names each, with its line.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
        repeated = [] if root is None else _repeated(root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also dates that are none, and texts without end
        raise PlanError(source, [f"not valid YAML: {error}"]) from None
    if not isinstance(root, yaml.MappingNode):
        raise PlanError(source, ["must hold a mapping with `name:` and `arms:`"])
    problems = [f"line {line}: `{key}` is given twice" for key, line in repeated]
    try:
        config = ExperimentConfig.model_validate(data)
    except ValidationError as error:
        problems += [_told(root, e["loc"], e["msg"]) for e in error.errors()]
    if problems:
        raise PlanError(source, problems)
    return config


def refuse(text: str, source: str, problems: Iterable[tuple[Place, str]]) -> None:
    """Refuse a text that `parse_config` took, for problems at places in it, each named with its line.

    Raises:
        PlanError: there are any.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert root is not None  # it was a plan
    told = [_told(root, place, problem) for place, problem in problems]
    if told:
        raise PlanError(source, told)


def _told(root: yaml.Node, place: Place, problem: str) -> str:
    where = ".".join(map(str, place))
    return f"line {_line(root, place)}: {where + ': ' if where else ''}{problem}"


def _line(node: yaml.Node, place: Place) -> int:
    """The line (from 1) of the deepest part of ``place`` that is in the file."""
    line = node.start_mark.line + 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(part)]
            if not found:
                break
            key, node = found[0]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _repeated(node: yaml.Node) -> list[tuple[str, int]]:
    """Keys that stand twice in one mapping: YAML keeps the last silently."""
    found: list[tuple[str, int]] = []
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            if key.value in names:
                found.append((key.value, key.start_mark.line + 1))
            names.add(key.value)
            found += _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            found += _repeated(item)
    return found
