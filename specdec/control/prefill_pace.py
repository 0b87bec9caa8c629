"""How many rows of prompts a step takes beside sequences that decode: as many as these have the time for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.control.costs import CostTable, MachineSpeed

SHORT_ANSWER = 32  # tokens, within which no step takes more than
MOST_SLOWDOWN = 2.5  # times what it would take without prompts: a short request is not held up by a long one
FADE = 0.1  # weight of one step in running averages
CLIP = 0.4  # log of the largest surprise one step may claim: an outlier is somebody else's process
FIRST_STEPS = 4  # of these the fastest replaces a guess: the very first forward may have warmed something up


@dataclass(slots=True)
class DecodeLoad:
    """What a step computes besides prompts that go on. sequences: that sample in it. rows: theirs, without drafts.
    looked: tokens that these rows look back on, the sum. target_ms: the least time between tokens that one of them
    has. begun: whether the answer of one has just begun.
    """

    sequences: int = 0
    rows: int = 0
    looked: float = 0.0
    target_ms: float = math.inf
    begun: bool = False

    def add(self, rows: int, context: float, target_ms: float, n_output: int) -> None:
        """A sequence that samples after ``n_output`` tokens, with ``rows`` rows that look back on ``context`` tokens
        each."""
        self.sequences += 1
        self.rows += rows
        self.looked += rows * context
        self.target_ms = min(self.target_ms, target_ms)
        self.begun = self.begun or n_output < SHORT_ANSWER


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What was in a step, and the milliseconds it took. decodes: sequences that sampled. rows: of its forward, of these
    ``draft_rows`` and ``prompt_rows``. context, prompt_context, plain_context: tokens that all rows, those of prompts,
    and the others looked back on, the means. other_ms: what was not the forward."""

    decodes: int
    rows: int
    draft_rows: int
    prompt_rows: int
    context: float
    prompt_context: float
    plain_context: float
    forward_ms: float
    other_ms: float


class PrefillPace:
    """Sizes prefill chunks by what a step is expected to take.

    A step with a prompt takes no longer than the least time between tokens that a sequence in it has as its objective,
    and while an answer has just begun, no longer than `MOST_SLOWDOWN` times the step without the prompt. But prompts
    have at least the share of the time that they are of all requests: else many that come together would wait for a
    batch that gets ever smaller. What is too little for a row is saved up for a later step, so every prompt ends.

    costs: of the target's forward, this object's own. Every step refines two shares by which it is off, of the forward
    without prompts and of what these add to it.
    """

    def __init__(self, costs: CostTable) -> None:
        self._costs, self._speed = costs, MachineSpeed()
        self._firsts_left = 0 if costs.known else FIRST_STEPS
        self._drafts = 0.0  # draft rows a sequence
        self._other_ms = 0.0  # of a step in which something is decoded: what is not its forward
        self._skipped = 0  # plans in a row that left prompts nothing

    def rows(self, load: DecodeLoad, prompts: int, context: float, most: int) -> int:
        """Rows, at most ``most``, for ``prompts`` prompts beside ``load``. context: tokens that their rows look back
        on."""
        if not load.sequences:
            return most
        plain_rows = load.rows + round(load.sequences * self._drafts)
        forward_ms = self._costs.ms(plain_rows, load.looked / load.rows)
        plain_ms = self._other_ms + forward_ms * (1.0 + self._speed.reading)
        limit_ms = min(load.target_ms, MOST_SLOWDOWN * plain_ms) if load.begun else load.target_ms
        spare_ms = max(limit_ms - plain_ms, plain_ms * prompts / load.sequences) * (1 + self._skipped)
        spare_ms /= 1.0 + self._speed.rows
        low, high = 0, most  # the answer lies between
        while low < high:
            middle = (low + high + 1) // 2
            if self._prompt_ms(plain_rows, middle, context + middle / 2) <= spare_ms:
                low = middle
            else:
                high = middle - 1
        self._skipped = 0 if low else self._skipped + 1
        return low

    def observe(self, step: StepTimes) -> None:
        """A step is over."""
        if step.decodes:
            self._drafts += FADE * (step.draft_rows / step.decodes - self._drafts)
            most_ms = self._other_ms + CLIP * (self._other_ms + step.forward_ms)
            self._other_ms += FADE * (min(step.other_ms, most_ms) - self._other_ms)
        if step.forward_ms <= 0:
            return  # too short for the clock
        if self._firsts_left:
            self._firsts_left -= 1
            if not self._costs.known or step.forward_ms < self._costs.ms(step.rows, step.context):
                self._costs.scale_to(step.rows, step.context, step.forward_ms)
            return
        plain_rows, more_ms = max(1, step.rows - step.prompt_rows), 0.0
        if step.prompt_rows:
            more_ms = self._prompt_ms(plain_rows, step.prompt_rows, step.prompt_context)
        plain_ms, speed = self._costs.ms(plain_rows, step.plain_context), self._speed
        expected = plain_ms * (1.0 + speed.reading) + more_ms * (1.0 + speed.rows)
        surprise = max(-CLIP, min(CLIP, math.log(step.forward_ms / expected)))
        speed.observe(plain_ms, more_ms, expected, surprise)

    def _prompt_ms(self, plain_rows: int, rows: int, context: float) -> float:
        """By the table, what ``rows`` rows of prompts add to a forward of ``plain_rows``: they share its reading of
        weights, and look back on other tokens."""
        ms = self._costs.ms
        return ms(plain_rows + rows) - ms(plain_rows) + ms(rows, context) - ms(rows)
