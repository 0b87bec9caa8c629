"""Who drafts: a drafter proposes where its expected gain exceeds its cost, or where a trial is worth its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.control.estimates.drafters import DrafterYield
from specdec.control.inputs import IDLE, DraftDecision, DraftRecord, SequenceInputs
from specdec.control.params import ControlParams


@dataclass(frozen=True, slots=True)
class DraftPrices:
    """Prices of drafting in the coming step, in milliseconds."""

    token_ms: float
    """A token without this drafter, in this batch."""
    row_ms: float
    """Verifying one node."""
    levels: Sequence[float]
    """A level by the number of sequences that share it, from 0."""


@dataclass(slots=True)
class _Estimate:
    """Expected results of one step with the drafter on a sequence."""

    tokens: float
    """Accepted tokens."""
    levels: float
    """Levels grown."""
    gross_ms: float
    """Milliseconds gained, before levels are paid."""
    steps: float
    """Steps that the estimate rests on."""
    ahead: float
    """Further steps that the sequence is expected to take."""
    prefill_ms: float
    """Draft prefill to pay first."""
    worth: float
    """Highest price of a level at which proposing pays, in milliseconds."""
    idle: int
    """Steps since the drafter's last proposal for the sequence."""


_UNKNOWN = DraftRecord(idle=1 << 30)


def choose_sequences(
    drafter: DrafterYield,
    sequences: Sequence[SequenceInputs],
    eligible: Sequence[bool],
    covered: Sequence[float],
    prefill_ms: Sequence[float],
    prices: DraftPrices,
) -> list[DraftDecision]:
    """Per sequence ON, OFF, PROBE, FORCED or INELIGIBLE.

    A drafter proposes where its accepted tokens are worth more than its levels and rows, in milliseconds of the batch.
    Elsewhere a trial is an investment (value of information; the knowledge gradient of Frazier et al. 2008): the gain
    expected on the rest of the sequence and on later requests, if the trial shows that the drafter pays, against the
    cost of the trial.

    covered: chance that other drafters' trees hold the next token. prefill_ms: cost of the drafter's pending prefill.
    """
    decisions = [
        DraftDecision.INELIGIBLE if not ok else DraftDecision.FORCED if one.forced else DraftDecision.OFF
        for one, ok in zip(sequences, eligible, strict=True)
    ]
    off = [i for i, decision in enumerate(decisions) if decision is DraftDecision.OFF]
    forced, levels, params = decisions.count(DraftDecision.FORCED), prices.levels, drafter.params
    pools = {bucket: drafter.pool(bucket) for bucket in {one.history.bucket for one in sequences}}
    found = {i: _estimate(drafter, sequences[i], pools, covered[i], prefill_ms[i], prices) for i in off}
    off.sort(key=lambda i: -found[i].worth)
    # The most sequences that all pay when they share the price of a level.
    on = max((n for n, i in enumerate(off, 1) if found[i].worth > levels[forced + n] / (forced + n)), default=0)
    for i in off[:on]:
        decisions[i] = DraftDecision.ON
    rest = [i for i in off[on:] if sequences[i].room > params.min_trial_room]
    if rest:
        paid, n = levels[forced + on], len(rest)
        shared = (levels[forced + on + n] - paid) / n
        pool = pools[sequences[rest[0]].history.bucket]
        longest = max(rest, key=lambda i: found[i].idle)
        if n > 1 and _joint_trial_pays(drafter, [found[i] for i in rest], pool, shared, prices):
            for i in rest:
                decisions[i] = DraftDecision.PROBE
        elif _trial_pays(drafter, found[longest], pool, levels[forced + on + 1] - paid, shared, len(off), prices):
            decisions[longest] = DraftDecision.PROBE
    return decisions


def reads_end_alone(drafter: DrafterYield, one: SequenceInputs, saved_ms: float, token_ms: float) -> bool:
    """Whether the drafter reads only the end of a sequence's text.

    The answer may end at any time. So the whole is read only once its gain on the answer so far would have covered its
    cost: the break-even rule of the ski rental problem, at most twice the cost of the best choice in hindsight (Karlin
    et al. 1988).

    saved_ms: draft prefill that the end alone saves. token_ms: a token without the drafter.
    """
    pool = drafter.pool(one.history.bucket)
    steps = one.emitted / (1.0 + pool.tokens / pool.steps)
    return saved_ms > drafter.params.whole_text_gain * pool.tokens / pool.steps * token_ms * steps


def split_prefill(
    decisions: list[DraftDecision], pending: Sequence[int], limit: int, params: ControlParams
) -> dict[int, int]:
    """Index of each sequence whose pending prefill exceeds this step's ``limit``, with the tokens to compute now.

    Changes their ``decisions`` to PREFILL, or to OFF where this step has no room left. Short ones go first.
    """
    long = [i for i, n in enumerate(pending) if n > params.short_prefill and decisions[i] not in IDLE]
    chunks: dict[int, int] = {}
    left = limit
    for i in sorted(long, key=pending.__getitem__):
        if pending[i] > left:
            decisions[i] = DraftDecision.PREFILL if left else DraftDecision.OFF
            chunks |= {i: left} if left else {}
        left = max(0, left - pending[i])
    return chunks


def _estimate(
    drafter: DrafterYield,
    one: SequenceInputs,
    pools: Mapping[int, DraftRecord],
    covered: float,
    prefill_ms: float,
    prices: DraftPrices,
) -> _Estimate:
    params, pool = drafter.params, pools[one.history.bucket]
    record = one.history.records.get(drafter.name, _UNKNOWN)
    share, steps = params.pool_steps / pool.steps, params.pool_steps + record.steps
    tokens = (share * pool.tokens + record.tokens) / steps
    levels = (share * pool.levels + record.levels) / steps
    rows = (share * pool.rows + record.rows) / steps
    ahead = max(1.0, min(one.room, max(params.min_tokens_ahead, one.emitted)) / (1.0 + tokens))
    gross_ms = tokens * (1.0 - covered) * prices.token_ms - rows * prices.row_ms
    worth = (gross_ms - prefill_ms / ahead) / levels
    return _Estimate(tokens, levels, gross_ms, steps, ahead, prefill_ms, worth, record.idle)


def _trial_pays(
    drafter: DrafterYield,
    found: _Estimate,
    pool: DraftRecord,
    level_ms: float,
    shared: float,
    sequences: int,
    prices: DraftPrices,
) -> bool:
    """Whether a trial on one sequence pays, for itself and for others.

    level_ms: price of a level for this sequence. shared: its share of a level if all sequences join.
    """
    params = drafter.params
    loss = max(0.0, found.levels * level_ms - found.gross_ms)
    # The sequence's difference to the others lasts as long as its records do.
    own = min(found.ahead, 1.0 / (1.0 - params.sequence_retention)) * _expected_improvement(
        found.gross_ms - found.levels * shared,
        prices.token_ms * _posterior_move(found.tokens, found.steps, params.trial_steps),
    )
    future = _future_gain(pool, found, shared, params.trial_steps, params.future_tokens, prices)
    if own + future > params.trial_steps * loss + found.prefill_ms:
        return True
    # Texts may have changed: each idle step loses a share of the drafter's average gain.
    tokens, levels, rows = drafter.prior
    price = (levels * shared + rows * prices.row_ms) / prices.token_ms
    gain = sequences * prices.token_ms * tokens * math.exp(-price / tokens)
    return pool.idle * params.drift_chance * gain > loss + found.prefill_ms


def _joint_trial_pays(
    drafter: DrafterYield, found: Sequence[_Estimate], pool: DraftRecord, shared: float, prices: DraftPrices
) -> bool:
    """Whether a trial on all these sequences together pays, where one alone cannot pay for a level."""
    params, n = drafter.params, len(found)
    loss = max(0.0, sum([one.levels * shared - one.gross_ms for one in found]))
    tokens = params.future_tokens + n * params.min_tokens_ahead
    gain = _future_gain(pool, found[0], shared, n * params.trial_steps, tokens, prices)
    return gain > params.trial_steps * loss + sum([one.prefill_ms for one in found])


def _future_gain(
    pool: DraftRecord, found: _Estimate, shared: float, trial: float, tokens: float, prices: DraftPrices
) -> float:
    """Milliseconds that ``trial`` more observed steps are expected to gain on ``tokens`` future tokens."""
    mean = pool.tokens / pool.steps
    net_ms = mean * prices.token_ms - (pool.rows * prices.row_ms + pool.levels * shared) / pool.steps
    deviation = prices.token_ms * _posterior_move(mean, pool.steps, trial)
    net_ms -= found.prefill_ms / found.ahead  # later requests are assumed to need as much
    return tokens / (1.0 + mean) * (_expected_improvement(net_ms, deviation) - max(0.0, net_ms))


def _expected_improvement(mean: float, deviation: float) -> float:
    """E[max(0, X)] of a normal X: the expected gain of an option that is taken only if it gains."""
    if deviation <= 0.0:
        return max(mean, 0.0)
    z = mean / deviation
    return 0.5 * mean * math.erfc(-z / math.sqrt(2.0)) + deviation * math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)


def _posterior_move(tokens: float, steps: float, trial: float) -> float:
    """Standard deviation by which ``trial`` more steps move a mean of ``tokens`` that rests on ``steps`` steps.

    Accepted tokens of a step are taken to be geometrically distributed, so their variance is tokens * (1 + tokens).
    """
    return math.sqrt(tokens * (1.0 + tokens) / steps * trial / (steps + trial))
