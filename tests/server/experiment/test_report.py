"""The page contains the whole result and loads no other resource. The command writes it and prints the verdict."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from server.experiment.analysis.analyse import analyse
from server.experiment.folder import ExperimentFolder, Manifest, StoredState
from server.experiment.records import RecordLog, RecordWriter
from server.experiment.report.charts import Axis, short
from server.experiment.report.render import _span, render
from specdec.cli.main import cli
from tests.server.experiment.simulated import manifest, paired

VOID = {"meta", "br", "hr", "img", "input", "link"}


class _Page(HTMLParser):
    """Text, tags and attributes; fails if tags do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page() -> tuple[str, _Page]:
    plan = manifest(secondary=["ttft_ms@p95", "tpot_ms:mean"], name="a-name")
    html = render(analyse(plan, paired(plan, 120, 0.7, seed=1)))
    return html, _Page(html)


def test_the_verdict_is_first_and_the_report_is_complete(page: tuple[str, _Page]) -> None:
    text = " ".join(page[1].text.split())
    order = [
        "Better: auto answers",
        "The arms",
        "speculation",
        "Quantiles",
        "Secondary",
        "Guardrails",
        "Where",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    for part in ("Simulated <CPU> 3000", "0123abcd+", "none & nowhere", "error_rate", "0 of 120 pairs differ", "@p95"):
        assert part in text


def test_the_page_needs_no_network_and_no_script(page: tuple[str, _Page]) -> None:
    html, parsed = page
    assert not parsed.tags & {"script", "link", "img", "iframe", "object", "embed"}
    assert not {name for name, _ in parsed.attributes} & {"src", "href", "srcset", "action"}
    assert "url(" not in html
    assert "@import" not in html
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert 'name="viewport"' in html


def test_the_charts_are_valid_svg_within_their_frames(page: tuple[str, _Page]) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page[0], re.S)
    assert len(drawings) == 4
    for drawing in drawings:
        root = ET.fromstring(drawing)
        assert root.attrib["aria-label"]
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for shape in root:
            for points in (shape.get("points") or "").split():
                x, y = map(float, points.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_the_settings_that_differ_are_first(page: tuple[str, _Page]) -> None:
    text = page[1].text
    assert text.index("request.speculation") < text.index("request.priority")


def test_bug_settings_are_shown_as_a_plan_spells_them() -> None:
    arms = {"a": {"request": {"speculation": False}}, "b": {"request": {"speculation": {"mode": True, "max_depth": 3}}}}
    plan = manifest(arms=arms)
    result = analyse(plan, paired(plan, 30, 1.0, seed=2))
    assert result.arms[0].settings == {"request.speculation": "off"}
    assert result.arms[1].settings == {"request.speculation.mode": "on", "request.speculation.max_depth": "3"}


def test_texts_are_escaped() -> None:
    bad = "<script>alert(1)</script>"
    plan = manifest(arms={bad: {"request": {"speculation": bad}}, "b": {}})
    plan = plan.model_copy(update={"facts": {bad: bad}})
    html = render(analyse(plan, paired(plan, 30, 1.0, seed=2)))
    assert "<script" not in html
    assert "script" not in _Page(html).tags


def test_results_with_gaps_still_make_a_page() -> None:
    plan = manifest(secondary=["ttft_ms@p95"], primary="e2e_ms:mean")
    log = paired(plan, 9, 1.0, seed=3)
    assert _Page(render(analyse(plan, log))).text
    few = RecordLog([r for r in log.records if r.pair == "p0"])
    assert "too few" in _Page(render(analyse(plan, few))).text


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=5), st.booleans())
def test_axes_keep_order_and_range(values: list[float], logarithmic: bool) -> None:
    axis = Axis(values, 50, 350, logarithmic)
    places = [axis.at(v) for v in sorted(values)]
    assert places == sorted(places)
    assert all(50 <= place <= 350 for place in places)
    assert (axis.at(-math.inf), axis.at(math.inf)) == (50, 350)
    ticks = axis.ticks()
    assert ticks == sorted(ticks)
    assert len(ticks) <= 14


def test_bug_a_ratio_above_1_has_as_many_digits_as_one_below() -> None:
    assert _span((0.9963, 1.0041)) == "0.996 … 1.004"


def test_numbers_are_short() -> None:
    assert [short(v) for v in (0, 0.0123, 1.5, 123.4, 5000, 12345, -0.5)] == [
        "0",
        "0.0123",
        "1.5",
        "123",
        "5000",
        "12.3k",
        "-0.5",
    ]


def test_bug_millions_are_as_many_thousands() -> None:
    assert [short(v) for v in (999_600, 1_000_000, 1_234_567, -2_500_000)] == ["1000k", "1000k", "1235k", "-2500k"]


def _folder(tmp_path: Path, plan: Manifest, log: RecordLog) -> Path:
    ExperimentFolder(tmp_path).write_manifest(plan)
    with closing(RecordWriter(tmp_path)) as writer:
        for record in log.records:
            writer.write(record)
    return tmp_path


def _ab(*args: object) -> Result:
    return CliRunner().invoke(cli, ["ab", *map(str, args)])


def test_analyze_writes_result_and_report_and_its_exit_code_is_the_verdict(tmp_path: Path) -> None:
    plan = manifest()
    folder = _folder(tmp_path, plan, paired(plan, 60, 1.5, seed=4))
    done = _ab("analyze", folder)
    assert done.exit_code == 10, done.output
    assert done.output.startswith("Worse: auto answers ")
    assert (folder / "report.html").exists()
    assert json.loads((folder / "result.json").read_text())["verdict"]["kind"] == "worse"
    assert _ab("analyze", folder, "--demand", "none").exit_code == 0
    assert json.loads(_ab("analyze", folder, "--json", "--demand", "none").output)["name"] == "off-or-auto"


def test_plan_reports_units_and_power(tmp_path: Path) -> None:
    plan = manifest(assignment={"mode": "aa"})
    folder = _folder(tmp_path, plan, paired(plan, 60, 1.0, seed=5))
    done = _ab("plan", folder, "--effect", "20%", "--simulations", 50, "--metric", "e2e_ms:mean", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["power"] >= 0.8
    assert found["unit_name"] == "pair"
    assert 16 <= found["units"] <= 200
    smaller = json.loads(
        _ab("plan", folder, "--effect", "10%", "--simulations", 50, "--metric", "e2e_ms:mean", "--json").output
    )
    assert smaller["units"] > 2 * found["units"]
    always = ("--effect", "20%", "--simulations", 50, "--metric", "e2e_ms:mean", "--always-valid")
    units = json.loads(_ab("plan", folder, *always, "--json").output)["units"]
    assert f"`stopping: {{rule: always_valid, expected_units: {units}}}`" in _ab("plan", folder, *always).output


def test_bug_a_plan_counts_the_pairs_that_lack_the_metric(tmp_path: Path) -> None:
    plan = manifest(assignment={"mode": "aa"})
    log = paired(plan, 60, 1.0, seed=5)
    silent = {f"p{number}" for number in range(0, 60, 3)}
    log.records = [replace(r, first_token=None) if r.pair in silent else r for r in log.records]
    folder = _folder(tmp_path, plan, log)
    words = ("--effect", "20%", "--simulations", 50, "--metric")
    units = json.loads(_ab("plan", folder, *words, "ttft_ms:mean", "--json").output)["units"]
    assert (
        f"40 of 60 pairs have ttft_ms: run {math.ceil(units * 1.5)}\n"
        in _ab("plan", folder, *words, "ttft_ms:mean").output
    )
    assert "of 60 pairs have" not in _ab("plan", folder, *words, "e2e_ms:mean").output


def test_bug_a_plan_from_arms_that_differ_says_so(tmp_path: Path) -> None:
    plan = manifest()
    folder = _folder(tmp_path, plan, paired(plan, 60, 0.5, seed=5))
    done = _ab("plan", folder, "--effect", "20%", "--simulations", 50, "--metric", "e2e_ms:mean")
    assert done.output.startswith("the arms of this experiment differ, ")
    same = manifest(assignment={"mode": "aa", "unit": "request"}, arms={"a": {"weight": 2}, "b": {}})
    assert same.config.arms_are_equal


def test_bug_the_folder_of_a_running_experiment_yields_no_verdict_of_a_fixed_rule(tmp_path: Path) -> None:
    plan = manifest()
    folder = _folder(tmp_path, plan, paired(plan, 60, 1.5, seed=4))
    for state, code in (("running", 11), ("stopped", 10)):
        ExperimentFolder(folder).note(StoredState(state=state, at="2026-11-21T12:00:00+00:00"))
        assert _ab("analyze", folder).exit_code == code
    (folder / "state.json").write_text("")
    damaged = _ab("analyze", folder).output
    assert "delete it, which stops the experiment" in damaged
    assert "pydantic" not in damaged
    (folder / "state.json").unlink()
    left = ExperimentFolder(folder).state()
    assert (left.state, left.records) == ("stopped", {"off": 60, "auto": 60})


def test_an_impossible_analysis_fails_with_one_line(tmp_path: Path) -> None:
    assert "manifest.json: cannot be read" in _ab("analyze", tmp_path).output
    plan = manifest(assignment={"mode": "aa"})
    folder = _folder(tmp_path, plan, paired(plan, 10, 1.0, seed=6))
    refused = _ab("plan", folder, "--effect", "5%")
    assert refused.exit_code == 1
    assert "too few for a plan" in refused.output
    assert _ab("plan", folder, "--effect", "lots").exit_code == 2
    assert "--metric: no metric 'x'" in _ab("plan", folder, "--effect", "5%", "--metric", "x@p50").output
