"""The figures of one run of load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from bench.serve.load_run import LoadRun
from bench.serve.objective import Objective
from bench.serve.record import Record
from bench.serve.spread import spread

MAX_SLIP_MS = 10.0


@dataclass(frozen=True, slots=True)
class ServeReport:
    """``about``: what was run where. ``max_slip_ms``: how late the generator may be at p99. ``price_per_hour``: of the
    machine that served, 0 for none given."""

    run: LoadRun
    about: Mapping[str, Any] = field(default_factory=dict)
    objectives: Seq[Objective] = ()
    price_per_hour: float = 0.0
    max_slip_ms: float = MAX_SLIP_MS

    @property
    def answered(self) -> list[Record]:
        """Requests with a whole answer."""
        return [record for record in self.run.records if record.ok]

    @property
    def duration_s(self) -> float:
        """From the beginning to the end of the last answer."""
        return max(self.run.ended_s - self.run.started_s, 1e-9)

    @property
    def good(self) -> list[Record]:
        """Answered within every objective."""
        return [record for record in self.answered if all(limit.kept_by(record) for limit in self.objectives)]

    def faults(self) -> list[str]:
        """Why the figures are not the server's: the generator could not keep up. Empty for a valid run."""
        found = []
        slips = spread([record.slip_ms for record in self.run.records])
        if self.run.open_loop and slips.get("p99", 0.0) > self.max_slip_ms:
            found.append(
                f"requests were sent late: {slips['p99']:.1f} ms at p99, {self.max_slip_ms:g} are allowed; "
                "run the generator on a machine of its own, or ask for less"
            )
        lags = spread(self.run.lags_ms)
        if lags.get("p99", 0.0) > self.max_slip_ms:
            found.append(
                f"the generator itself was busy: its event loop was {lags['p99']:.1f} ms late at p99, "
                f"{self.max_slip_ms:g} are allowed"
            )
        if not self.answered:
            found.append("no request was answered")
        return found

    def latencies(self) -> dict[str, dict[str, float | int]]:
        """Spreads in ms of TTFT, TPOT, E2E and the time between messages, and of the tokens in a message."""
        answered = self.answered
        told = [count for record in answered for count in record.chunk_tokens]
        means = [r.output_tokens / len(r.chunk_s) for r in answered if r.chunk_s and not r.chunk_tokens]
        return {
            "ttft_ms": spread([record.ttft_ms for record in answered]),
            "tpot_ms": spread([tpot for record in answered if (tpot := record.tpot_ms) is not None]),
            "inter_chunk_ms": spread([gap for record in answered for gap in record.gaps_ms]),
            "e2e_ms": spread([record.e2e_ms for record in answered]),
            # Where the server does not say how many tokens a message has, each answer counts with its mean.
            "tokens_per_chunk": spread(told or means),
        }

    def as_dict(self, *, requests: bool = True) -> dict[str, Any]:
        """JSON-able: every figure, and those of every request unless not asked for."""
        records, faults = self.run.records, self.faults()
        figures: dict[str, Any] = {
            **self.about, "valid": not faults, "faults": faults, "duration_s": round(self.duration_s, 3),
            "requests": {"planned": self.run.planned, "sent": len(records)} | self._outcomes(),
            "latency": self.latencies(), "throughput": self._throughput(), "goodput": self._goodput(),
            "generator": {
                "slip_ms": spread([record.slip_ms for record in records]), "lag_ms": spread(self.run.lags_ms),
            },
            "refusals": self._refusals(), "errors": dict(Counter(r.error for r in records if not r.ok).most_common(10)),
        }  # fmt: skip
        if self.price_per_hour:
            spent = self.price_per_hour * self.duration_s / 3600
            tokens = sum(record.output_tokens for record in self.answered)
            figures["cost"] = {"price_per_hour": self.price_per_hour, "output_tokens_per_dollar": round(tokens / spent)}
        steps = [r.tokens_per_step for r in self.answered if r.tokens_per_step is not None]
        if steps:
            figures["tokens_per_step"] = spread(steps)
        if requests:
            figures["each"] = [record.as_dict(self.run.started_s) for record in records]
        return figures

    def _outcomes(self) -> dict[str, int]:
        counts = Counter(record.outcome for record in self.run.records)
        return {outcome: counts[outcome] for outcome in ("ok", "refused", "failed", "cut")}

    def _throughput(self) -> dict[str, float]:
        answered = self.answered
        totals = {
            "requests": len(answered),
            "output_tokens": sum(r.output_tokens for r in answered),
            "prompt_tokens": sum(r.prompt_tokens for r in answered),
        }
        return {f"{name}_per_s": round(total / self.duration_s, 4) for name, total in totals.items()}

    def _goodput(self) -> dict[str, Any]:
        good, sent = self.good, len(self.run.records)
        return {
            "objectives": [str(limit) for limit in self.objectives],
            "requests_per_s": round(len(good) / self.duration_s, 4),
            "output_tokens_per_s": round(sum(r.output_tokens for r in good) / self.duration_s, 4),
            "share_of_sent": round(len(good) / sent, 4) if sent else 0.0,
        }

    def _refusals(self) -> dict[str, Any]:
        refused = [record for record in self.run.records if record.outcome == "refused"]
        hints = [record.retry_after_s for record in refused if record.retry_after_s is not None]
        return {"n": len(refused), "with_retry_hint": len(hints), "retry_after_s": spread(hints)}
