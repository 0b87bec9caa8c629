"""Prometheus's rules for names, types, units and help, over every family that a server exports."""

from __future__ import annotations

import re

import pytest
from prometheus_client.metrics_core import Metric

from tests.server.observe.metrics.scrape import Scrape

NAME, LABEL = re.compile(r"(specdec|process)_[a-z0-9]+(_[a-z0-9]+)*"), re.compile(r"[a-z][a-z_]*")
OTHER_UNITS = {"ms", "milliseconds", "microseconds", "minutes", "hours", "kib", "mib", "kb", "mb", "percent"}
TYPES = {"counter", "gauge", "histogram", "summary"}
OF_A_TYPE = ("_total", "_count", "_sum", "_bucket", "_created")


def complaints(family: Metric) -> list[str]:
    """Return what is wrong with a family."""
    name, words = family.name, set(family.name.split("_"))
    labels = {label for sample in family.samples for label in sample.labels}
    found = {
        "name": not NAME.fullmatch(name),
        "unit": bool(words & OTHER_UNITS),
        "type": family.type not in TYPES or bool(words & (TYPES - {"counter"})) or name.endswith(OF_A_TYPE),
        "help": len(family.documentation) < 5 or not family.documentation.endswith("."),
        "label": not all(LABEL.fullmatch(label) for label in labels),
    }
    return [what for what, wrong in found.items() if wrong]


def test_every_family_follows_prometheus_naming(exported: Scrape) -> None:
    families = exported.families.values()
    assert len(families) > 40
    assert not {family.name: wrong for family in families if (wrong := complaints(family))}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("# HELP specdec:steps_total Steps.\n# TYPE specdec:steps_total counter\nspecdec:steps_total 1\n", "name"),
        ("# HELP specdec_wait_ms Waited.\n# TYPE specdec_wait_ms gauge\nspecdec_wait_ms 1\n", "unit"),
        ("# HELP specdec_steps_total Steps.\n# TYPE specdec_steps_total gauge\nspecdec_steps_total 1\n", "type"),
        ("# HELP specdec_pages Pages\n# TYPE specdec_pages gauge\nspecdec_pages 1\n", "help"),
        ('# HELP specdec_info Model.\n# TYPE specdec_info gauge\nspecdec_info{Target="x"} 1\n', "label"),
    ],
)
def test_a_violation_is_detected(text: str, wrong: str) -> None:
    (family,) = Scrape(text).families.values()
    assert complaints(family) == [wrong]
