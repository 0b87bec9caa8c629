"""Compares outcomes without tolerance and says where they first part."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.verify.runner import Outcome, Outcomes


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a sample first differs from plain decode. ``position`` counts output tokens from 0."""

    request_id: str
    index: int
    company: str
    position: int
    expected: str
    got: str
    context: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"request {self.request_id} sample {self.index} in company `{self.company}`, output token "
            f"{self.position}: expected {self.expected}, got {self.got}; the tokens before: {list(self.context)}"
        )


def first_mismatches(company: str, plain: Outcomes, other: Outcomes) -> list[Mismatch]:
    """One mismatch per sample that differs in any token, log-probability or its reason to end."""
    found = []
    for (request_id, index), expected in plain.items():
        got = other.get((request_id, index), Outcome())
        difference = _difference(expected, got)
        if difference is not None:
            position, left, right = difference
            context = tuple(expected.tokens[max(0, position - 8) : position])
            found.append(Mismatch(request_id, index, company, position, left, right, context))
    return found


def _difference(expected: Outcome, got: Outcome) -> tuple[int, str, str] | None:
    for position in range(max(len(expected.tokens), len(got.tokens))):
        left = expected.tokens[position] if position < len(expected.tokens) else None
        right = got.tokens[position] if position < len(got.tokens) else None
        if left != right:
            return position, f"token {left}", f"token {right}"
    for position, (one, two) in enumerate(zip(expected.logprobs, got.logprobs, strict=False)):
        if one != two:
            return position, f"log-probabilities {one}", f"{two}"
    if len(expected.logprobs) != len(got.logprobs):
        return len(expected.tokens), f"{len(expected.logprobs)} log-probabilities", f"{len(got.logprobs)}"
    if expected.finish != got.finish:
        return len(expected.tokens), f"end by {expected.finish}", f"end by {got.finish}"
    return None
