"""The chart of times per token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.peers.chart import time_per_token_chart
from specdec.errors import ConfigError
from tests.bench.peers.test_peers_report import a_run

NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


def bars(svg: str) -> dict[str, float]:
    """Lengths by title."""
    found = {}
    for rect in ElementTree.fromstring(svg).iterfind(".//svg:rect", NAMESPACE):
        title = rect.find("svg:title", NAMESPACE)
        if title is not None:
            found[str(title.text)] = float(rect.attrib["width"])
    return found


def test_bars_are_as_long_as_their_times() -> None:
    found = bars(time_per_token_chart(a_run().as_dict()))
    assert list(found) == [
        "chat, specdec off: 60 ms", "chat, specdec auto: 30 ms", "chat, fast: 30 ms", "chat, fast n-gram: 10 ms",
        "chat, slow: 110 ms",
    ]  # fmt: skip
    per_ms = [width / float(title.split()[-2]) for title, width in found.items()]
    assert max(per_ms) - min(per_ms) < 0.01


def report(workload: str, **times: float | None) -> dict[str, Any]:
    arms = {arm: {"median_ms": ms} for arm, ms in times.items()}
    return {"workloads": {workload: arms}, "engines": {arm: {"weights": "<int8>"} for arm in times}}


def test_of_an_engines_drafting_settings_the_fastest_is_drawn() -> None:
    given = report("edit", ours=10.0, plain=40.0, mod=20.0, simple=30.0) | {"notes": []}
    given["workloads"]["chat"] = {
        "plain": {"median_ms": 30.0},
        "mod": {"median_ms": 33.0},
        "simple": {"median_ms": 31.0},
    }
    for arm in ("mod", "simple"):
        given["engines"][arm]["plain"] = "plain"
    assert list(bars(time_per_token_chart(given))) == [
        "edits, ours: 10 ms", "edits, plain: 40 ms", "edits, mod: 20 ms", "chat, plain: 30 ms", "chat, simple: 31 ms",
    ]  # fmt: skip


def test_names_and_notes_are_shown() -> None:
    svg = time_per_token_chart(report("edit", ours=10.0, gone=None) | {"notes": ["a & b"]})
    assert list(bars(svg)) == ["edits, ours: 10 ms"]
    texts = [text.text for text in ElementTree.fromstring(svg).iterfind("svg:text", NAMESPACE)]
    assert "a & b" in texts
    assert "ours (<int8>)" in texts
    assert not any("gone" in str(text) for text in texts)


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no engine has a time"):
        time_per_token_chart(report("chat", gone=None))


def test_the_chart_of_the_documentation_is_drawn_from_its_figures() -> None:
    figures = Path(__file__).parents[3] / "docs" / "figures"
    drawn = time_per_token_chart(json.loads((figures / "time-per-token.json").read_text()))
    assert drawn == (figures / "time-per-token.svg").read_text()
