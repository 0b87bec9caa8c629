"""The reliability plot."""

from __future__ import annotations

import pytest
from rich.console import Console

from bench.engine_session import bar, calibration_error, reliability_figures, reliability_table


def test_bar_shows_both_chances() -> None:
    assert bar(0.5, 1.0, 10) == "█████┃████"
    assert bar(1.0, 0.0, 10) == "·········┃"
    assert bar(0.0, 0.3, 10) == "┃██·······"


def test_calibration_error_is_weighted() -> None:
    assert calibration_error([]) == 0.0
    assert calibration_error([(0.5, 0.5, 100.0), (0.8, 0.4, 100.0)]) == pytest.approx(0.2)
    assert calibration_error([(0.5, 0.5, 300.0), (0.8, 0.4, 100.0)]) == pytest.approx(0.1)


def test_table_and_figures_list_every_bin_by_rising_chance() -> None:
    bins = {"suffix": [(0.9, 0.8, 20.0), (0.1, 0.2, 12.0)], "model": []}
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(reliability_table(bins))
    lines = [line for line in capture.get().splitlines() if "suffix" in line]
    assert ["0.10" in lines[0], "0.90" in lines[1], "0.80" in lines[1], "20" in lines[1]] == [True] * 4
    figures = reliability_figures(bins)
    assert [b["predicted"] for b in figures["suffix"]["bins"]] == [0.1, 0.9]
    assert figures["model"] == {"calibration_error": 0.0, "bins": []}
