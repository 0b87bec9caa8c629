"""Writes the tables of cluster.yaml in docs/scaling.md from its classes: `python -m tools.cluster_reference`."""

from __future__ import annotations

from pydantic import BaseModel

from cluster.config import ClusterConfig, ModelConfig, ReleaseConfig
from tools.config_reference import default_of, own_fields, sections, type_of, unit_of
from tools.markdown import REPOSITORY, header, row, with_parts

DOCUMENT = REPOSITORY / "docs" / "scaling.md"
_LISTED = ("models", "releases")  # these have separate tables


def parts() -> dict[str, type[BaseModel]]:
    """The classes by their place in the file."""
    return {
        "the file itself": ClusterConfig,
        **sections(ClusterConfig),
        "models, a list": ModelConfig,
        **sections(ModelConfig, "models."),
        "models.releases, by name": ReleaseConfig,
    }


def tables() -> str:
    """A table of fields per class."""
    lines: list[str] = []
    for section, model in parts().items():
        lines += [f"**{section}**", "", *header("field", "type", "default", "unit", "meaning")]
        for name, field in own_fields(model).items():
            if name not in _LISTED:
                default = "" if field.is_required() else f"`{default_of(field)}`"
                about = (unit_of(name, field), field.description or "")
                lines.append(row(f"`{name}`", type_of(field), default, *about))
        lines.append("")
    return "\n".join(lines)


def updated(document: str) -> str:
    """``document`` with current tables."""
    return with_parts(document, {"cluster.yaml": tables()})


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
