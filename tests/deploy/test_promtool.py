"""Prometheus 2's own checks of the exported metrics and of the files in deploy/."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deploy.prometheus_program import program
from tests.server.observe.metrics.scrape import Scrape

PROMTOOL = program("promtool")
DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: make promtool")


def promtool(*words: str | Path, given: str = "") -> str:
    """Return its output; fails the test if it reports an error."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], input=given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_has_no_complaint_about_the_metrics(exported: Scrape) -> None:
    assert promtool("check", "metrics", given=exported.text) == ""


def test_the_configuration_and_its_rules_are_valid() -> None:
    assert "rules found" in promtool("check", "config", DEPLOY / "prometheus.yml")
