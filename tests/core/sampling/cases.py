"""Random rows for the kernels: every feature on and off, ties, extremes, dead logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from verify_kernels.sampling import RowSampling, SamplingPolicy, SequenceEdits

SPECIALS = (np.nan, np.inf, -np.inf, 1e30, -1e30, 3e38, -3e38, 1e-42, -1e-42, 0.0, -0.0)
SIZES = (1, 2, 5, 63, 64, 65, 200, 1000, 9000)


@dataclass(frozen=True)
class Case:
    """Logits and how to sample them, one `RowSampling` per row."""

    logits: Tensor
    rows: list[RowSampling]


@st.composite
def policies(draw: st.DrawFn) -> SamplingPolicy:
    """A policy with each feature off half of the time."""
    off = st.booleans()
    return SamplingPolicy(
        seed=draw(st.integers(0, 2**64 - 1)),
        temperature=draw(st.sampled_from([0.0, 1e-6, 1e-3, 0.3, 0.7, 1.0, 1.0, 2.0, 50.0, 1e6])),
        top_k=0 if draw(off) else draw(st.sampled_from([1, 2, 3, 10, 64, 100, 1000, 10**6])),
        top_p=1.0 if draw(off) else draw(st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-12])),
        min_p=0.0 if draw(off) else draw(st.sampled_from([1e-30, 1e-4, 0.05, 0.5, 1.0])),
        repetition_penalty=1.0 if draw(off) else draw(st.sampled_from([0.5, 1.1, 3.0])),
        presence_penalty=0.0 if draw(off) else draw(st.sampled_from([-1.5, 0.3, 2.0])),
        frequency_penalty=0.0 if draw(off) else draw(st.sampled_from([-0.7, 0.1, 1.0])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One to five rows of one vocabulary."""
    vocab, count = draw(st.sampled_from(SIZES)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = [_row(draw, rng, vocab) for _ in range(count)]
    logits = np.stack([_logits(draw, rng, vocab) for _ in range(count)])
    return Case(torch.from_numpy(logits), rows)


def _logits(draw: st.DrawFn, rng: np.random.Generator, vocab: int) -> np.ndarray:
    scale = draw(st.sampled_from([0.0, 1e-40, 0.01, 1.0, 3.0, 3.0, 10.0, 1e6, 1e29]))
    x = (rng.standard_normal(vocab) * scale).astype(np.float32)
    kind = draw(st.sampled_from(["plain", "plain", "ties", "peaked", "specials", "dead"]))
    if kind == "ties":
        x = np.round(x)
    elif kind == "peaked":
        x[rng.integers(vocab)] += 20
    elif kind == "specials":
        some = rng.random(vocab) < draw(st.sampled_from([0.1, 0.9]))
        x[some] = rng.choice(SPECIALS, some.sum())
    elif kind == "dead":
        x[rng.random(vocab) < 0.98] = -np.inf
    return x


def _row(draw: st.DrawFn, rng: np.random.Generator, vocab: int) -> RowSampling:
    policy, position = draw(policies()), draw(st.integers(0, 2**40))
    if draw(st.booleans()):
        return RowSampling(policy, position)
    above = vocab + 3  # ids beyond the logits' columns must be passed over
    mask = None
    if draw(st.booleans()):
        words = max(1, -(-vocab // 32) - draw(st.integers(0, 1)))  # a mask may end before the logits do
        mask = rng.integers(0, 2**32, words, dtype=np.uint32) | rng.integers(0, 2**32, words, dtype=np.uint32)
    n_bias = draw(st.integers(0, 4))
    edits = SequenceEdits(
        bias_ids=rng.choice(above, n_bias, replace=False).astype(np.int32),
        bias_values=rng.choice([-100.0, -1.0, 0.5, 5.0, 1e30], n_bias).astype(np.float32),
        mask=mask,
        banned=rng.integers(0, above, draw(st.integers(0, 3))).astype(np.int32),
        seen=rng.integers(0, above, draw(st.integers(0, 30))).tolist(),
    )
    edits.add_output(rng.integers(0, above, draw(st.integers(0, 100))).tolist())
    path = edits.path_counts(rng.integers(0, above, draw(st.integers(0, 8))).tolist())
    return RowSampling(policy, position, edits, path, draw(st.booleans()))
