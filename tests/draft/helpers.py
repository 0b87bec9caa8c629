"""Sequences and tasks for drafter tests."""

from __future__ import annotations

from draft.protocol import DraftTask
from specdec.sampling import SequenceSampling
from specdec.sequence import Sequence
from specdec.types import Request, SamplingParams, StoppingParams


def make_sequence(tokens: list[int]) -> Sequence:
    return Sequence(Request("r", tuple(tokens)), 0, 1, 0.0)


def make_task(sequence: Sequence, nodes: int = 7, depth: int = 7, width: int = 2) -> DraftTask:
    params = SamplingParams(temperature=0.0)
    sampling = SequenceSampling(params, StoppingParams(), 1, 1000, (), sequence.tokens)
    return DraftTask(sequence, sampling, nodes, depth, width)
