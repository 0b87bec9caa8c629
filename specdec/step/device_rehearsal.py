"""Steps of nonsense before any request comes, so that none waits for a compiler or for a graph to be recorded."""

from __future__ import annotations

import dataclasses

import numpy as np

from specdec.models.device.device_decoder import DeviceDecoder
from specdec.step.device_verifier import DeviceVerifier
from specdec.step.step_rows import StepRows
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.row_sampling import RowSampling
from verify_kernels.sampling_policy import SamplingPolicy
from verify_kernels.sequence_edits import SequenceEdits

TREES = (1, 2, 4, 8, 16, 32, 64)  # rows of a lone sequence's steps, and of many sequences' together
POLICIES = (
    SamplingPolicy(0, temperature=0.0),
    SamplingPolicy(0, temperature=1.0),
    SamplingPolicy(0, temperature=1.0, top_p=0.9),
)
TIMES = 3  # compiled, recorded, replayed
TOP = 5  # tokens whose log-probabilities are asked for


def rehearse(verifier: DeviceVerifier, decoder: DeviceDecoder) -> None:
    """One sequence's steps of common sizes and samplings, and its prompts. Masks, penalties and log-probabilities are
    rarer: of these all that is compiled comes up, but hardly a graph. Writes to the pool's first pages, which nobody
    may use yet."""
    for rows in (size for size in TREES if size <= decoder.max_logit_rows):
        for policy in POLICIES:
            for _ in range(TIMES):
                _run(verifier, rows, [RowSampling(policy, PAGE_SIZE)] * rows)
    for policy in POLICIES:
        _run(verifier, 1, [_edited(policy, decoder.config.vocab_size)], TOP)
    most = min(decoder.max_rows, decoder.pool.pages * PAGE_SIZE, decoder.max_positions)
    _run(verifier, most, [])


def _edited(policy: SamplingPolicy, vocab: int) -> RowSampling:
    """With all that may be asked of a row beside ``policy``."""
    everything = np.full(-(-vocab // 32), 2**32 - 1, np.uint32)
    bias, first = np.ones(1, np.float32), np.zeros(1, np.int32)
    edits = SequenceEdits(first, bias, everything, first, [0])
    return RowSampling(dataclasses.replace(policy, repetition_penalty=1.1), PAGE_SIZE, edits, (0, 1), ban=True)


def _run(verifier: DeviceVerifier, rows: int, samplings: list[RowSampling], top: int | None = None) -> None:
    """A chain of ``rows`` rows: a tree where they are sampled, else a prompt's."""
    entry = BatchEntry([0] * rows, range(-1, rows - 1), 0, list(range(-(-rows // PAGE_SIZE))))
    sampled = list(range(len(samplings)))
    step = StepRows(ForwardBatch.build([entry]), sampled, [0], [0], [0 if sampled else -1])
    _, pending = verifier.queue(step, samplings, [top])
    if sampled:
        pending.read()
