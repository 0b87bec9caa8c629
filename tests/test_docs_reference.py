"""Generated parts of the documents are current and complete."""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from server.http.app import ENDPOINTS
from specdec.config import load_config
from tools import api_reference, config_reference
from tools.markdown import REPOSITORY, row, with_parts

PROTOS = sorted((REPOSITORY / "specdec" / "api" / "v1").glob("*.proto"))
FIELDS = [
    (section, name, field)
    for section, model in config_reference.sections().items()
    for name, field in config_reference.own_fields(model).items()
]
CLUSTER_FIELDS = [
    (section, name, field)
    for section, model in config_reference.cluster_parts().items()
    for name, field in config_reference.own_fields(model).items()
]


@pytest.mark.parametrize(
    ("document", "updated"),
    [
        (config_reference.DOCUMENT, config_reference.updated),
        (config_reference.CLUSTER_DOCUMENT, config_reference.cluster_updated),
        (api_reference.DOCUMENT, api_reference.updated),
    ],
    ids=["configuration", "cluster", "api"],
)
def test_generated_parts_are_current(document: Path, updated: Callable[[str], str]) -> None:
    text = document.read_text(encoding="utf-8")
    assert text == updated(text), "run `make map`"


@pytest.mark.parametrize(
    ("section", "name", "field"),
    [*FIELDS, *CLUSTER_FIELDS],
    ids=[f"{s}.{n}" for s, n, _ in [*FIELDS, *CLUSTER_FIELDS]],
)
def test_every_setting_is_described_and_every_number_has_a_unit(section: str, name: str, field: Any) -> None:
    assert field.description
    assert field.description[0] not in " ."
    number = {int, float} & set(config_reference._parts(field.annotation))
    assert bool(number) == bool(config_reference.unit_of(name, field)), "give it a unit, see tools/config_reference.py"


def test_every_setting_is_documented() -> None:
    text = config_reference.DOCUMENT.read_text(encoding="utf-8")
    assert len(re.findall(r"^\| `\w+` \|", text, re.MULTILINE)) == len(FIELDS) > 50, "run `make map`"
    assert "| `grpc_port` | whole number, from 0 to 65,535 | `8400` | port number | `--grpc-port` |" in text
    assert "| `dtype` | `auto`, `int8`, `bf16`, `fp32` | `auto` |  | `--dtype` |" in text
    assert "| `cors_origins` | list of text | `[]` |" in text
    assert "| `target_tpot_ms` | number, above 0 | `80.0` | ms |" in text


def test_values_shown_with_a_setting_are_among_its_values() -> None:
    allowed: dict[str, set[str]] = {}
    for _, name, field in FIELDS:
        values = {value for part in config_reference._parts(field.annotation) for value in get_args(part)}
        allowed.setdefault(name, set()).update(value for value in values if isinstance(value, str))
    shown = [
        (page.name, name, value)
        for page in (*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"))
        for name, value in re.findall(r"`(\w+): (\w+)`", page.read_text(encoding="utf-8"))
        if allowed.get(name)
    ]
    assert len(shown) > 10
    assert not [each for each in shown if each[2] not in allowed[each[1]]]


def test_the_shown_configurations_are_valid(tmp_path: Path) -> None:
    text = config_reference.DOCUMENT.read_text(encoding="utf-8")
    one, several = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "one.yaml").write_text(one)
    assert load_config(tmp_path / "one.yaml").engine.target == yaml.safe_load(one)["engine"]["target"]
    (tmp_path / "several.yaml").write_text(several)
    engines = yaml.safe_load(several)["engines"]
    found = load_config(tmp_path / "several.yaml").engines
    assert {name: engine.target for name, engine in found.items()} == {n: e["target"] for n, e in engines.items()}


def test_every_call_message_and_endpoint_is_in_the_document() -> None:
    text = api_reference.DOCUMENT.read_text(encoding="utf-8")
    assert len(PROTOS) >= 7
    for file in (importlib.import_module(f"specdec.api.v1.{path.stem}_pb2") for path in PROTOS):
        for service in file.DESCRIPTOR.services_by_name.values():
            assert f"### {service.name}\n" in text
            assert all(f"| `{call.name}` |" in text for call in service.methods), "run `make map`"
        for message in file.DESCRIPTOR.message_types_by_name.values():
            parts = re.findall(rf"^#### {message.name}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
            assert len(parts) == 1, f"{message.name}: run `make map`"
            (part,) = parts
            assert all(f"| `{field.name}` = {field.number} |" in part for field in message.fields), "run `make map`"
    for endpoint in ENDPOINTS:
        assert f"### {endpoint.method} {endpoint.path.replace(':path', '')}\n" in text, "run `make map`"


def test_bug_calls_without_a_body_list_the_query_that_names_a_model() -> None:
    for path in ("/readyz", "/trace", "/v1/loads", "/v1/experiments", "/v1/experiments/{name}"):
        found = [endpoint for endpoint in ENDPOINTS if endpoint.path == path]
        assert found
        for endpoint in found:
            assert "model" in {given["name"] for given in endpoint.parameters}, endpoint


def test_links_inside_the_api_resolve_to_a_heading() -> None:
    text = api_reference.DOCUMENT.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert len(links) > 40
    assert links <= headings


def test_a_document_without_its_markers_is_rejected() -> None:
    with pytest.raises(ValueError, match="once each"):
        with_parts("text", {"fields": "x"})
    assert with_parts("a\n<!-- b -->\nold\n<!-- end of b -->\nc", {"b": "new"}).splitlines()[2:4] == ["", "new"]


def test_cells_cannot_break_a_table() -> None:
    assert row("a|b", "c\n d", "<x>") == r"| a\|b | c d | \<x> |"


def test_the_picture_is_readable_in_light_and_dark() -> None:
    """Every class that has a colour has another one in the dark; every shape has a class."""
    root = ElementTree.parse(REPOSITORY / "docs" / "tree-step.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    light, dark = root.findtext(f"{space}style", "").split("@media (prefers-color-scheme: dark)")
    coloured = {name: rule for name, rule in re.findall(r"([.\w]+) \{([^}]*)\}", light) if "#" in rule}
    darkened = dict(re.findall(r"([.\w]+) \{([^}]*)\}", dark))
    assert set(coloured) == set(darkened)
    assert all(set(re.findall("#[0-9a-f]{6}", coloured[n])).isdisjoint(darkened[n].split()) for n in coloured)
    for shape in [*root.iter(f"{space}rect"), *root.iter(f"{space}path")]:
        assert f".{shape.get('class')}" in coloured
