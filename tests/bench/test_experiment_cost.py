"""What a running experiment costs is measured on the parts that a server runs."""

from __future__ import annotations

import itertools

import pytest

from bench import experiment_cost
from bench.experiment_cost import MESSAGES, UNITS, ExperimentCost


def test_every_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = experiment_cost.RecordWriter.write
    monkeypatch.setattr(
        experiment_cost.RecordWriter, "write", lambda self, record: (written.append(record), write(self, record))
    )
    figures = ExperimentCost(requests=100, prompt_tokens=20).run()
    assert set(figures) == {*(f"assign_{unit}" for unit in UNITS), "message", "record"}
    assert all(0 < found["p50_us"] <= found["p99_us"] for found in figures.values())
    assert len(written) == 100
    assert {record.arm for record in written} == {"narrow", "wide"}
    assert all((r.ok, r.tokens, r.chunks, r.prompt_tokens) == (True, 2 * MESSAGES, MESSAGES, 20) for r in written)


def test_only_what_an_experiment_adds_is_timed() -> None:
    ticks = itertools.count()
    figures = ExperimentCost(requests=100, prompt_tokens=5, clock=lambda: float(next(ticks))).run()
    assert all(found == {"p50_us": 1e6, "p99_us": 1e6} for found in figures.values())  # one reading to the next
