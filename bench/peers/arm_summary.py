"""What one arm's answers to one workload come to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.peers.answer import Answer


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """Times in ms. ``median_ms``: of the answers' times per token after the first; ``total_ms``: all their time over
    all their tokens. ``timed``: answers long enough to have such a time. ``tokens_per_s``: all
    tokens over all time, prompts read as well. ``over_auto``, ``over_off``: its time per token over ours, on those that
    both answered; less than 1 is faster than ours. ``same_text``: of the answers, how many are those of its engine
    without drafts, to the letter."""

    answered: int
    asked: int
    timed: int
    tokens: int
    median_ms: float | None = None
    total_ms: float | None = None
    ttft_ms: float | None = None
    tokens_per_s: float | None = None
    over_auto: float | None = None
    over_off: float | None = None
    same_text: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        names = self.__dataclass_fields__
        return {name: _rounded(getattr(self, name)) for name in names}


def summarise(
    answers: Mapping[str, Answer], asked: int, *, auto: Mapping[str, Answer], off: Mapping[str, Answer],
    plain: Mapping[str, Answer] | None,
) -> ArmSummary:  # fmt: skip
    """Of ``answers`` by prompt, of so many ``asked``. auto, off: ours; plain: those of the arm without drafts, None for
    that one itself."""
    times = [tpot for answer in answers.values() if (tpot := answer.tpot_ms) is not None]
    whole_s = sum(answer.e2e_ms for answer in answers.values()) / 1e3
    tokens = sum(answer.tokens for answer in answers.values())
    same = None
    if plain is not None:
        same = sum(name in plain and plain[name].text == answer.text for name, answer in answers.items())
    return ArmSummary(
        answered=len(answers), asked=asked, timed=len(times), tokens=tokens,
        median_ms=statistics.median(times) if times else None, total_ms=per_token(answers),
        ttft_ms=statistics.median(answer.ttft_ms for answer in answers.values()) if answers else None,
        tokens_per_s=tokens / whole_s if whole_s else None,
        over_auto=_over(answers, auto), over_off=_over(answers, off),
        same_text=same,
    )  # fmt: skip


def per_token(answers: Mapping[str, Answer]) -> float | None:
    """All time after the first tokens over all tokens after the first, ms."""
    timed = [answer for answer in answers.values() if answer.tpot_ms is not None]
    return sum(a.decode_ms for a in timed) / sum(a.decoded for a in timed) if timed else None


def _over(answers: Mapping[str, Answer], ours: Mapping[str, Answer]) -> float | None:
    both = [name for name in answers if name in ours and None not in (answers[name].tpot_ms, ours[name].tpot_ms)]
    theirs, base = per_token({n: answers[n] for n in both}), per_token({n: ours[n] for n in both})
    return theirs / base if theirs is not None and base else None


def _rounded(value: float | int | None) -> float | int | None:
    return round(value, 4) if isinstance(value, float) else value
