"""Reads a YAML file and command-line overrides into one validated `Config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from specdec.config.server_config import Config
from specdec.errors import ConfigError


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Merge a YAML file with dotted overrides (``{"engine.target": "x"}``; None values are skipped).

    Raises:
        ConfigError: the file can not be read, or a field is unknown or out of range; names every such field.
    """
    data = _read(path) if path else {}
    for dotted, value in (overrides or {}).items():
        if value is None:
            continue
        node = data
        *parents, leaf = dotted.split(".")
        for name in parents:
            node[name] = node.get(name) or {}  # `engine:` with nothing under it reads as null
            node = node[name]
            if not isinstance(node, dict):
                raise ConfigError(f"{path}: `{name}` must hold a mapping")
        node[leaf] = value
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{path or 'configuration'}: " + "; ".join(lines)) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can not be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a mapping with `engine:` and `server:`")
    return data
