"""What a verification found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from specdec.verify.company import Company
from specdec.verify.compare import Mismatch


@dataclass(frozen=True, slots=True)
class CompanyResult:
    """Counts of one company's run. ``accepted``: tokens that came from drafts."""

    company: Company
    pairs: int
    tokens: int
    accepted: int
    preemptions: int
    mismatches: int


@dataclass(slots=True)
class VerifyReport:
    """All companies against plain decode."""

    plain: Company
    plain_result: CompanyResult
    results: list[CompanyResult] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def pairs(self) -> int:
        """Pairs compared."""
        return sum(r.pairs for r in self.results)

    @property
    def tokens(self) -> int:
        """Tokens decoded in company."""
        return sum(r.tokens for r in self.results)

    @property
    def accepted(self) -> int:
        """Tokens in company that came from drafts."""
        return sum(r.accepted for r in self.results)

    @property
    def preemptions(self) -> int:
        """Preemptions that happened in company."""
        return sum(r.preemptions for r in self.results)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able figures."""
        return {
            "pairs": self.pairs,
            "tokens": self.tokens,
            "accepted": self.accepted,
            "preemptions": self.preemptions,
            "mismatches": len(self.mismatches),
            "first_mismatch": str(self.mismatches[0]) if self.mismatches else None,
            "companies": {r.company.name: {"pairs": r.pairs, "mismatches": r.mismatches} for r in self.results},
        }

    def table(self) -> Table:
        """One row per company."""
        table = Table("company", "pairs", "tokens", "drafted", "preempted", "mismatches", title="path identity")
        for result in (self.plain_result, *self.results):
            figures = (result.pairs, result.tokens, result.accepted, result.preemptions, result.mismatches)
            table.add_row(result.company.name, *map(str, figures))
        return table
