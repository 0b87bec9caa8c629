"""Writes the tables of docs/configuration.md and of cluster.yaml in docs/scaling.md from their classes:
`python -m tools.config_reference`."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config import ClusterConfig, ModelConfig, ReleaseConfig
from specdec.cli.serve import serve_command
from specdec.config import Config
from tools.markdown import REPOSITORY, header, row, with_parts

DOCUMENT = REPOSITORY / "docs" / "configuration.md"
CLUSTER_DOCUMENT = REPOSITORY / "docs" / "scaling.md"
_CLUSTER_LISTED = ("models", "releases")  # these have separate tables
# By the suffix of a field's name; `json_schema_extra` of a field overrides it.
_UNITS = {
    "_s": "seconds", "_ms": "milliseconds", "_tokens": "tokens", "_context": "tokens", "_bytes": "bytes",
    "_rows": "rows", "_nodes": "nodes", "_depth": "tokens", "_steps": "steps", "_requests": "requests",
    "_port": "port number",
}  # fmt: skip
_NAMES: dict[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true, false",
    Path: "path",
    Any: "value",
}
_BOUNDS = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}


def config_tables() -> str:
    """A table of fields per class, in the order of the source."""
    lines: list[str] = []
    flags = _flags()
    for section, model in sections().items():
        lines += [f"## {section}", "", *header("field", "type", "default", "unit", "option of serve", "meaning")]
        for name, field in own_fields(model).items():
            about = (unit_of(name, field), flags.get(f"{section}.{name}", ""), field.description or "")
            lines.append(row(f"`{name}`", type_of(field), f"`{default_of(field)}`", *about))
        lines.append("")
    return "\n".join(lines)


def cluster_parts() -> dict[str, type[BaseModel]]:
    """The classes of cluster.yaml by their place in the file."""
    return {
        "the file itself": ClusterConfig,
        **sections(ClusterConfig),
        "models, a list": ModelConfig,
        **sections(ModelConfig, "models."),
        "models.releases, by name": ReleaseConfig,
    }


def cluster_tables() -> str:
    """A table of fields per class of cluster.yaml."""
    lines: list[str] = []
    for section, model in cluster_parts().items():
        lines += [f"**{section}**", "", *header("field", "type", "default", "unit", "meaning")]
        for name, field in own_fields(model).items():
            if name not in _CLUSTER_LISTED:
                default = "" if field.is_required() else f"`{default_of(field)}`"
                about = (unit_of(name, field), field.description or "")
                lines.append(row(f"`{name}`", type_of(field), default, *about))
        lines.append("")
    return "\n".join(lines)


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a class that are not sections."""
    return {name: field for name, field in model.model_fields.items() if _model_of(field) is None}


def updated(document: str) -> str:
    """docs/configuration.md with current tables."""
    return with_parts(document, {"fields": config_tables()})


def cluster_updated(document: str) -> str:
    """docs/scaling.md with current tables."""
    return with_parts(document, {"cluster.yaml": cluster_tables()})


def sections(model: type[BaseModel] = Config, outer: str = "") -> dict[str, type[BaseModel]]:
    """The classes of settings by their section in the file; a section precedes its inner sections."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        inner = _model_of(field)
        if inner is not None:
            found[outer + name] = inner
            found |= sections(inner, f"{outer}{name}.")
    return found


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def unit_of(name: str, field: FieldInfo) -> str:
    """Return the unit of a number, or an empty string for other types."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "unit" in extra:
        return str(extra["unit"])
    if not {int, float} & set(_parts(field.annotation)):
        return ""
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def type_of(field: FieldInfo) -> str:
    """The values that a field accepts."""
    names = [_type_name(part) for part in _parts(field.annotation)]
    bounds = [
        text.format(f"{getattr(rule, key):,}")
        for rule in field.metadata
        for key, text in _BOUNDS.items()
        if getattr(rule, key, None) is not None
    ]
    return " or ".join(names) + (", " + " ".join(bounds) if bounds else "")


def _type_name(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is tuple:
        return f"list of {_type_name(typing.get_args(annotation)[0])}"
    if typing.get_origin(annotation) is dict:
        return f"{_type_name(typing.get_args(annotation)[1])} by name"
    return _NAMES[annotation]


def default_of(field: FieldInfo) -> str:
    """The default in YAML."""
    value = field.default
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(str(value) if isinstance(value, Path) else value, default_flow_style=True)
    return text.removesuffix("...\n").strip()


def _flags() -> dict[str, str]:
    """The option of `specdec serve` that sets a field, by the field's dotted name."""
    found = {"engine.speculation.drafters": "`--drafter`", "engine.indexes": "`--index`"}
    for parameter in serve_command.params:
        if parameter.name and "__" in parameter.name:
            names = (*parameter.opts, *parameter.secondary_opts)
            found[parameter.name.replace("__", ".")] = ", ".join(f"`{name}`" for name in names)
    return found


if __name__ == "__main__":
    for path, update in ((DOCUMENT, updated), (CLUSTER_DOCUMENT, cluster_updated)):
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
