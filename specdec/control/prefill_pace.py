"""Prefill chunk sizes: how many prompt rows a step computes beside decoding sequences."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from specdec.control.estimates.costs import CostTable, MachineSpeed
from specdec.control.params import DEFAULT_PARAMS, ControlParams

PROMPT_SIZES = 6  # of `PrefillPace.alone_ms`, from 1 to 1,024 rows


@dataclass(slots=True)
class DecodeLoad:
    """The sampling sequences of a step."""

    sequences: int = 0
    rows: int = 0
    """Their rows, without drafts."""
    attended: float = 0.0
    """Sum over these rows of the tokens that they attend to."""
    target_ms: float = math.inf
    """The lowest objective of time between tokens."""
    fewest_output: float = math.inf
    """Output tokens of the youngest answer."""

    def add(self, rows: int, context: float, target_ms: float, n_output: int) -> None:
        """Add a sequence with ``n_output`` output tokens, whose ``rows`` rows attend to ``context`` tokens each."""
        self.sequences += 1
        self.rows += rows
        self.attended += rows * context
        self.target_ms = min(self.target_ms, target_ms)
        self.fewest_output = min(self.fewest_output, n_output)


@dataclass(slots=True)
class StepTimes:
    """Contents and duration of a step."""

    decodes: int = 0
    """Sequences that sampled."""
    rows: int = 0
    """Rows of the forward."""
    draft_rows: int = 0
    """Draft tokens among them."""
    context: float = 0.0
    """Mean tokens that all rows attended to."""
    prompt_context: float = 0.0
    """The same for prompt rows."""
    plain_context: float = 0.0
    """The same for rows of pending tokens."""
    forward_ms: float = 0.0
    """0: not measured, since another forward ran meanwhile or the clock is too coarse."""
    other_ms: float = 0.0
    """The rest of the step."""

    @property
    def prompt_rows(self) -> int:
        """Prompt rows before the pending tokens."""
        return self.rows - self.draft_rows - self.decodes


class PrefillPace:
    """Sizes prefill chunks so that decoding sequences keep their time between tokens.

    A step with a prompt takes at most the lowest objective of its sequences. While an answer has just begun, it takes
    at most `ControlParams.new_answer_slowdown` times the step without the prompt. Prompts get at least the share of
    time that they are of all requests; otherwise a burst of prompts would wait for an ever smaller batch. Time that is
    too short for a row accumulates, so every prompt completes.

    costs: of the target's forward, owned by this object. Each step refines two speeds, of the forward without prompts
    and of the rows that prompts add.
    """

    def __init__(self, costs: CostTable, params: ControlParams = DEFAULT_PARAMS) -> None:
        self._costs, self._speed, self._params = costs, MachineSpeed(params), params
        self._guesses_left = 0 if costs.known else params.guess_steps
        self._drafts = 0.0  # mean draft rows per sequence
        self._other_ms = 0.0  # mean milliseconds of a decoding step besides its forward
        self._skipped = 0  # consecutive plans without room for a prompt row

    def rows(self, load: DecodeLoad, prompts: int, context: float, most: int) -> int:
        """Rows, at most ``most``, for ``prompts`` prompts beside ``load``; their rows attend to ``context`` tokens."""
        if not load.sequences:
            return most
        if not prompts:
            return 0
        plain_rows = load.rows + round(load.sequences * self._drafts)
        forward_ms = self._costs.ms(plain_rows, load.attended / load.rows)
        plain_ms = self._other_ms + forward_ms * (1.0 + self._speed.reading)
        limit_ms = load.target_ms
        if load.fewest_output < self._params.new_answer_tokens:
            limit_ms = min(limit_ms, self._params.new_answer_slowdown * plain_ms)
        spare_ms = max(limit_ms - plain_ms, plain_ms * prompts / load.sequences) * (1 + self._skipped)
        spare_ms /= 1.0 + self._speed.rows
        sizes = range(1, most + 1)
        fit = bisect_right(sizes, spare_ms, key=lambda rows: self._prompt_ms(plain_rows, rows, context + rows / 2))
        self._skipped = 0 if fit else self._skipped + 1
        return fit

    def alone_ms(self) -> tuple[float, ...]:
        """By k, the expected milliseconds of a forward of 4^k prompt rows that runs alone; empty before any forward."""
        if not self._costs.known:
            return ()
        first_ms, speed = self._costs.ms(1), self._speed
        rows = (4**k for k in range(PROMPT_SIZES))
        return tuple(
            first_ms * (1.0 + speed.reading) + (self._costs.ms(count) - first_ms) * (1.0 + speed.rows) for count in rows
        )

    def observe(self, step: StepTimes) -> None:
        """Update from a finished step."""
        weight, limit = self._params.average_weight, self._params.max_log_pace_surprise
        if step.decodes:
            self._drafts += weight * (step.draft_rows / step.decodes - self._drafts)
            most_ms = self._other_ms + limit * (self._other_ms + step.forward_ms)
            self._other_ms += weight * (min(step.other_ms, most_ms) - self._other_ms)
        if step.forward_ms <= 0:
            return  # too short for the clock
        if self._guesses_left:
            self._guesses_left -= 1
            if not self._costs.known or step.forward_ms < self._costs.ms(step.rows, step.context):
                self._costs.scale_to(step.rows, step.context, step.forward_ms)
            return
        plain_rows, more_ms = max(1, step.rows - step.prompt_rows), 0.0
        if step.prompt_rows:
            more_ms = self._prompt_ms(plain_rows, step.prompt_rows, step.prompt_context)
        plain_ms, speed = self._costs.ms(plain_rows, step.plain_context), self._speed
        expected = plain_ms * (1.0 + speed.reading) + more_ms * (1.0 + speed.rows)
        surprise = max(-limit, min(limit, math.log(step.forward_ms / expected)))
        speed.observe(plain_ms, more_ms, expected, surprise)

    def _prompt_ms(self, plain_rows: int, rows: int, context: float) -> float:
        """Milliseconds that ``rows`` prompt rows, attending to ``context`` tokens, add to a forward of ``plain_rows``.

        They share its reading of weights. Not below 0, as measured times of padded forwards may fall with the context.
        """
        ms = self._costs.ms
        return max(0.0, ms(plain_rows + rows) - ms(plain_rows) + ms(rows, context) - ms(rows))
