"""Every constant of the controller, in one record that a trace carries and a replay restores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ControlParams:
    """Constants of estimates and policies.

    Figures are from docs/log.md: time per token over that of the default, a mean over simulated worlds
    (`tests/control/simulator.py`), so 1.01 means one per cent slower. A field without a figure was chosen by hand; no
    measurement has compared it with another value.
    """

    # Costs of forwards (estimates/costs.py)
    max_log_surprise: float = 0.25
    """Bound on |log(measured / expected)| of one forward. A larger deviation is another process on the machine."""
    guessed_row_share: float = 0.03  # guessed cost of a further row, as a share of the first row's
    row_price_rows: int = 4
    """Rows over which the price of a further row is averaged. With 8, the last of which cost some processors
    several times as much as the first, drafting stops too early: 1.015, at most 1.17."""
    context_step: int = 128  # tokens; cost curves are cached for multiples of this context length
    speed_retention: float = 0.998
    """Weight that a machine speed keeps per observation. The rest returns to the measured grid."""
    common_walk: float = 0.025
    """Standard deviation of the change per forward that both machine speeds share, as a share of measured time. 0.03
    with `own_walk` 0.01 attributed a slow spell to one of the two."""
    own_walk: float = 0.02
    """Standard deviation of the change per forward of each machine speed alone, as a share of measured time."""
    timing_noise: float = 0.1  # standard deviation of one forward's measured time, as a share of it
    first_speed_spread: float = 0.05  # standard deviation of both machine speeds right after the grid is measured
    first_speed_correlation: float = 0.8  # correlation of the two machine speeds right after the grid is measured
    min_speed: float = -0.8  # lower bound of a machine speed, so of costs too: a fifth of the measured time
    max_speed: float = 8.0  # upper bound of a machine speed: nine times the measured time

    # Acceptance rates (estimates/acceptance.py)
    shift_precision: float = 4.0
    """Prior precision of the shift of log-odds from a drafter's own probabilities to what is observed."""
    max_shift: float = 2.0  # bound of that shift; without it 1.0000, since no simulated world states wrong chances
    shrinkage: float = 32.0  # observations that a coarser estimate counts for in a finer one
    cell_memory: float = 300.0  # observations; a cell with more of them is halved
    min_chance: float = 1e-3  # lower bound of an estimated acceptance rate: no estimate is certain
    max_chance: float = 0.995  # upper bound of an estimated acceptance rate
    refresh_steps: int = 12
    """Steps between recomputations of the acceptance rates. At every step they took most of the controller's time."""
    sequence_rate_retention: float = 0.9
    """Weight that a lookup drafter's acceptance ratio on one sequence keeps per proposal. Without that ratio,
    fill-in-the-middle after edits runs at 0.68 to 0.88 of plain decoding's speed."""
    learned_cell_trials: float = 16.0  # observations that a cell of an earlier run counts for, at most
    learned_pool_steps: float = 10.0
    """Steps that a drafter's yield of an earlier run counts for, at most. With 12 and no prior beside, outdated
    records cost 1.18 to 1.37; with 10 and `restart_prior_steps` 2 they cost 1.003 to 1.096."""

    # Costs and yields of drafters (estimates/drafters.py)
    average_weight: float = 0.1  # weight of one step in running averages
    max_lookup_surprise: float = 4.0
    """Bound on the time of a lookup proposal over its running average. Without it, a proposal of 60 ms in 300 ended
    lookups for good: 1.02 to 1.34 alone with little to copy."""
    ratio_retention: float = 0.98  # weight that a cost ratio keeps per observation
    prompt_cost_prior_ms: float = 200.0
    """Milliseconds of expected prompt time that the first guess of the prompt cost ratio counts for."""
    prompt_cost_bounds: tuple[float, float] = (0.3, 2.0)
    """Bounds of the prompt cost ratio: the time of a forward's prompt rows over that of as many sampling rows."""
    overhead_prior_ms: float = 200.0
    """Milliseconds of expected draft time that the first guess of the overhead ratio counts for."""
    overhead_bounds: tuple[float, float] = (1.0, 100.0)
    """Bounds of the overhead ratio: the time of a proposal over that of its levels and its long prefill."""
    prefill_prior_ms: float = 100.0
    """Milliseconds of expected draft prefill time that the first guess of its cost ratio counts for."""
    prefill_ratio_bounds: tuple[float, float] = (0.2, 4.0)
    """Bounds of the draft prefill ratio: the time of long prefill over that of as many rows of levels."""
    first_agreement: float = 0.7
    """Share of tree levels in which a drafter holds the target's choice, before observations."""
    agreement_weight: float = 0.02  # weight of one tree level in that share
    min_agreement: float = 0.2  # lower bound of that share where it prices a level
    short_prefill: int = 16
    """Tokens. The first level of a tree computes this many pending tokens at no extra cost; an accepted run or a pause
    leaves so many."""
    prefill_chunk: int = 192  # tokens of pending prefill computed in one draft forward
    prefill_plain_steps: float = 2.0
    """Time that draft prefill may add to a step shared with other sequences, in plain steps."""
    max_prefill: int = 512
    """Tokens of draft prefill in one step of a single sequence: another request may arrive at any time."""

    # Who drafts (policies/who_drafts.py)
    model_prior: tuple[float, float, float] = (1.5, 3.0, 3.0)
    """Accepted tokens, levels and verified rows per step of a model-based drafter without observations."""
    lookup_prior: tuple[float, float, float] = (0.5, 1.0, 0.0)  # the same of all lookup drafters together
    prior_steps: float = 4.0
    """Steps that the prior counts for. With 1, four unlucky trees turned a good drafter off for 80 steps: 1.22."""
    restart_prior_steps: float = 2.0
    """Steps that the prior counts for beside records of an earlier run: requests may have changed."""
    pool_steps: float = 8.0
    """Steps of a sequence's own records that count as much as the records of all sequences of its temperature."""
    sequence_retention: float = 0.95  # weight that a sequence's records keep per step in which the drafter proposes
    pool_retention: float = 0.995  # the same for the records of all sequences
    min_tokens_ahead: int = 32
    """Tokens that a sequence is expected to emit still, or as many as it has emitted: an answer may end any time."""
    whole_text_gain: float = 0.1
    """Accepted tokens that a draft model gains by reading the whole text, as a share of those with its end alone.
    Computed from chains of three tokens on HumanEval: 0.10; in answers of 130 and 260 tokens 0.07 and 0.08."""
    future_tokens: float = 300.0
    """Tokens of later requests that benefit from knowing a drafter's yield. With 100: 0.9997."""
    trial_steps: float = 4.0  # steps that a trial takes. With 2: 1.0002
    min_trial_room: int = 8  # tokens left to emit below which no trial starts
    probe_every: int = 16
    """Steps. At each multiple, nodes of any chance are proposed, so that a rate that fell too low is corrected."""
    drift_chance: float = 0.00625  # chance per step that texts have changed so that an idle drafter pays again
    min_weighed_share: float = 0.01  # share of a token's time below which lookup drafters are not weighed at all
    max_weak_share: float = 0.05
    """Share of a token's time above which lookup drafters propose nothing after a single token. That brings 0.2 tokens:
    SmolLM2's chats, where it takes a tenth, run at 1.00 of plain decoding's speed without it and at 0.98 with it;
    HumanEval on Qwen without a draft, where it takes a hundredth, at 1.16 without it and at 1.26 with it."""

    rest_steps: tuple[int, int] = (8, 32)
    """Least and most steps that are decoded without a decision after a decision against drafting: twice as many as had
    none before it."""

    # Value of time (controller.py)
    speedup_retention: float = 0.95
    """Weight that the observed speed-up keeps per step. Without the speed-up as price of time: 1.0075, worst 1.067."""
    speedup_prior_steps: float = 4.0  # steps that the first estimate of the speed-up counts for

    # How deep (policies/how_deep.py)
    max_level_price: float = 0.95
    """Chance of being reached above which a node is always expanded, whatever a level costs."""

    # Which nodes (policies/which_nodes.py)
    min_node_chance: float = 2e-3  # chance of being reached below which a node is never proposed
    late_price_share: float = 0.5
    """Share of its row's price that a node of a sequence behind its objective must be worth to be proposed. At 1 such a
    sequence stays behind where rows are expensive. At 0.5 the other sequences take up to 1.13 times as long as without
    drafts, at 0.3 up to 1.22 times."""
    first_token_delay: float = 0.02
    """Share by which a sequence's draft nodes may lengthen the forward that ends its prompt."""

    # Prefill beside decoding (prefill_pace.py)
    new_answer_tokens: int = 32  # tokens of an answer during which `new_answer_slowdown` applies
    new_answer_slowdown: float = 2.5  # longest step beside an answer that has just begun, in steps without prompts
    max_log_pace_surprise: float = 0.4  # bound on |log(measured / expected)| of one step's forward
    guess_steps: int = 4  # steps whose fastest one replaces a guessed cost: the first forward also warms caches

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ControlParams:
        """The inverse of `dataclasses.asdict`, also after JSON; missing fields have their defaults."""
        given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return ControlParams(**given)


DEFAULT_PARAMS = ControlParams()
