"""The reliability plot: do nodes that were given a chance of 0.7 come true seven times in ten?"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from rich.table import Table

WIDTH = 40
# Predicted chance, observed rate, observations.
Bin = tuple[float, float, float]


def reliability_table(by_drafter: Mapping[str, Seq[Bin]]) -> Table:
    """One row per drafter and bin; the bar is what was observed, the mark what was predicted."""
    table = Table(
        "drafter", "predicted", "observed", "nodes", "observed █, predicted ┃", title="reliability of chances"
    )
    for drafter, bins in sorted(by_drafter.items()):
        for predicted, observed, weight in sorted(bins):
            table.add_row(drafter, f"{predicted:.2f}", f"{observed:.2f}", f"{weight:.0f}", bar(predicted, observed))
        table.add_section()
    return table


def bar(predicted: float, observed: float, width: int = WIDTH) -> str:
    """``width`` characters from chance 0 to 1."""
    filled, mark = round(observed * width), min(width - 1, max(0, round(predicted * width)))
    cells = ["█" if i < filled else "·" for i in range(width)]
    cells[mark] = "┃"
    return "".join(cells)


def calibration_error(bins: Seq[Bin]) -> float:
    """Expected calibration error (Naeini et al. 2015): mean distance of predicted and observed, by weight; 0 without
    observations."""
    total = sum(weight for _, _, weight in bins)
    return sum(abs(predicted - observed) * weight for predicted, observed, weight in bins) / total if total else 0.0


def reliability_figures(by_drafter: Mapping[str, Seq[Bin]]) -> dict[str, Any]:
    """JSON-able: per drafter its bins and its calibration error."""
    return {
        drafter: {
            "calibration_error": round(calibration_error(bins), 4),
            "bins": [
                {"predicted": round(p, 4), "observed": round(o, 4), "weight": round(w, 1)} for p, o, w in sorted(bins)
            ],
        }
        for drafter, bins in sorted(by_drafter.items())
    }
