"""The law a whole sequence should follow, by enumeration: plain floats and dictionaries, nothing of specdec's code."""

from __future__ import annotations

import itertools
import math

from specdec.core.types import SamplingParams
from tests.core.sampling.table_model import TableModel


def next_token_law(
    model: TableModel, params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...], banned: frozenset[int]
) -> dict[int, float]:
    """Probability of each next token that has any, after ``output``."""
    logits = model.row(prompt + output)
    for token in range(model.vocab):
        count = output.count(token)
        if count or token in prompt:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    for token, bias in params.logit_bias:
        logits[token] += bias
    allowed = set(params.allowed_token_ids or range(model.vocab)) - banned
    z = {token: logits[token] / params.temperature for token in allowed}
    kept = sorted(z, key=lambda token: (-z[token], token))
    kept = kept[: params.top_k or None]
    kept = _top_p(z, kept, params.top_p)
    kept = [token for token in kept if math.exp(z[token] - z[kept[0]]) >= params.min_p]
    total = math.fsum(math.exp(z[token]) for token in kept)
    return {token: math.exp(z[token]) / total for token in kept}


def _top_p(z: dict[int, float], kept: list[int], top_p: float) -> list[int]:
    total = math.fsum(math.exp(z[token]) for token in kept)
    sums = itertools.accumulate(math.exp(z[token]) / total for token in kept)
    needed = 1 + sum(1 for s in sums if s < top_p)
    return kept[:needed] if top_p < 1 else kept


def sequence_law(
    model: TableModel, params: SamplingParams, prompt: tuple[int, ...], length: int, ban: tuple[int, frozenset[int]]
) -> dict[tuple[int, ...], float]:
    """Probability of every output of ``length`` tokens; ``ban``: (min_tokens, ids banned below it)."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for step in range(length):
        banned = ban[1] if step < ban[0] else frozenset()
        law = {
            (*output, token): probability * p
            for output, probability in law.items()
            for token, p in next_token_law(model, params, prompt, output, banned).items()
        }
    return law
