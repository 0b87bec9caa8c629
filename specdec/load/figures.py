"""Figures as reports have them: spreads, rounded numbers, cells of tables. Light: imports numpy only when needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specdec.load.request import Record

QUANTILES = (50, 90, 95, 99)


def spread(values: Seq[float]) -> dict[str, float | int]:
    """``n``, and where there are values ``mean``, ``p50`` to ``p99`` and ``max``.

    A quantile is a value that was measured: the smallest that at least that share of all do not exceed.
    """
    import numpy as np

    if not values:
        return {"n": 0}
    points = np.percentile(values, QUANTILES, method="inverted_cdf")
    found: dict[str, float | int] = {"n": len(values), "mean": round(float(np.mean(values)), 4)}
    found |= {f"p{q}": round(float(point), 4) for q, point in zip(QUANTILES, points, strict=True)}
    return found | {"max": round(float(max(values)), 4)}


def throughput(answered: Seq[Record], seconds: float) -> dict[str, float]:
    """Requests, output tokens and prompt tokens of complete answers per second."""
    totals = {
        "requests": len(answered),
        "output_tokens": sum(record.output_tokens for record in answered),
        "prompt_tokens": sum(record.prompt_tokens for record in answered),
    }
    return {f"{name}_per_s": round(total / seconds, 4) for name, total in totals.items()}


def rounded(value: float | None) -> float | None:
    """For JSON: to four digits behind the point; whole numbers stay what they are."""
    return round(value, 4) if isinstance(value, float) else value


def in_cell(value: float | None, digits: int) -> str:
    """For a table, "-" where there is no figure."""
    return "-" if value is None else f"{value:.{digits}f}"


def brief(value: float) -> str:
    """With four digits; large values without an exponent."""
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def percent(share: float) -> str:
    """With as many digits as it needs, six at most."""
    return f"{share * 100:.6g}%"


def spread_cells(found: Mapping[str, float], columns: Seq[str]) -> list[str]:
    """The figures of a `spread` that ``columns`` name, as texts; "-" where there are no values."""
    return [brief(found[column]) if column in found else "-" for column in columns]


class FigureTable(NamedTuple):
    """A table of texts, for a terminal."""

    heads: Seq[str]
    rows: Iterable[Seq[str]]
    title: str = ""
    caption: str = ""
