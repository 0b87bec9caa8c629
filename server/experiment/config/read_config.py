"""Reads the file that describes an experiment; what is wrong is named with its line."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.experiment_errors import ExperimentError


def read_config(path: Path) -> ExperimentConfig:
    """Raises:
    ExperimentError: the file can not be read, or a field is unknown, missing or out of range; names each, with line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ExperimentError(f"{path}: can not be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ExperimentError(f"{path}: is not UTF-8 text") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ExperimentError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ExperimentError(f"{path}: must hold a mapping with `name:` and `arms:`")
    problems = [f"line {line}: `{key}` is given twice" for key, line in _repeated(root)]
    try:
        config = ExperimentConfig.model_validate(data)
    except ValidationError as error:
        for e in error.errors():
            where = ".".join(map(str, e["loc"]))
            problems.append(f"line {_line(root, e['loc'])}: {where + ': ' if where else ''}{e['msg']}")
    if problems:
        raise ExperimentError(f"{path}: " + "; ".join(problems))
    return config


def _line(node: yaml.Node, place: tuple[int | str, ...]) -> int:
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
