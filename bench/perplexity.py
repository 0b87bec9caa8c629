"""`specdec bench perplexity`: what a numeric type costs in quality, against fp32 on the same text."""

from __future__ import annotations

import math

import torch

from bench.texts import long_text
from specdec.engine.engine import EngineParts
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch

WINDOW = 512
CHUNK = 64


def perplexity(parts: EngineParts, tokens: int) -> float:
    """exp of the mean negative log-likelihood (nats) over about ``tokens`` tokens of real text, in windows of 512.

    The first token of a window is given, not scored.
    """
    ids = parts.tokenizer.encode(long_text())
    total, scored = 0.0, 0
    for start in range(0, min(tokens, len(ids) - 1), WINDOW):
        window = ids[start : start + WINDOW + 1]
        total += _window_nll(parts, window)
        scored += len(window) - 1
    return math.exp(total / scored)


def _window_nll(parts: EngineParts, window: list[int]) -> float:
    pages = list(range(-(-len(window) // PAGE_SIZE)))
    nll = 0.0
    for at in range(0, len(window) - 1, CHUNK):
        rows = window[at : min(at + CHUNK, len(window) - 1)]
        batch = ForwardBatch.build([BatchEntry(rows, list(range(-1, len(rows) - 1)), at, pages)])
        logits = parts.decoder.forward(batch, range(len(rows)))
        targets = torch.tensor(window[at + 1 : at + 1 + len(rows)])
        nll += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return nll
