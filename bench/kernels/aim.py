"""One line of the table of aims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Figures = Callable[[Mapping[str, Any]], Iterator[tuple[float, str]]]


@dataclass(frozen=True, slots=True)
class Aim:
    """``measure`` is to be ``bound`` at most, or at ``least``; ``figures`` finds what a report says of it, each with
    its case. ``part``: which cases it rests on, as the report's errors begin. ``skipped``: where that part's figures
    say why one of them could not be had."""

    measure: str
    part: str
    bound: float
    figures: Figures
    least: bool = False
    skipped: str = ""

    def judged(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """As `aims` lists it, by the worst figure of all."""
        found = list(self.figures(report))
        line = {"measure": self.measure, "aim": f"{'>=' if self.least else '<='} {self.bound:g}"}
        if not found:
            return {**line, "figure": None, "met": None, "note": f"not measured: {self._why_not(report)}"}
        figure, case = min(found) if self.least else max(found)
        met = figure >= self.bound if self.least else figure <= self.bound
        target = {step["target"] for step in report.get("steps", [])} if self.part.startswith("steps") else set()
        return {**line, "figure": round(figure, 4), "met": met, "note": ", ".join([case, *sorted(target)])}

    def _why_not(self, report: Mapping[str, Any]) -> str:
        figures = report.get(self.part.split()[0], [])
        reasons = [line[self.skipped] for line in figures if line.get(self.skipped)]
        reasons += [f"{error['case']}: {error['message']}" for error in report["errors"] if self._rests(error["case"])]
        reasons += [f"no time was left for {case}" for case in report["left_out"] if self._rests(case)]
        return reasons[0] if reasons else "the benches did not come to it, or found nothing of the kind"

    def _rests(self, case: str) -> bool:
        return case.startswith(self.part) or self.part.startswith(case)
