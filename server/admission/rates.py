"""How fast the engine has lately been, as seen from its answers."""

from __future__ import annotations

from server.admission.running_mean import RunningMean
from specdec.types import Finished, FinishReason

LEAST_SAMPLES = 5  # finished ones before anything is concluded
STALE_S = 15.0  # without news the machine may be as fast as ever
LEAST_PROMPT = 32  # computed tokens below which a prefill's time is that of a step, whatever its length
# Samples that were begun together end together: what lies between two ends is mostly nothing, and then a lot.
INTERVAL_WEIGHT = 1 / 32
_CUT_SHORT = (FinishReason.ABORTED, FinishReason.DEADLINE)


class Rates:
    """Running means over finished samples; unknown with few of them, or none lately. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._prefill = RunningMean()  # seconds per prompt token that was computed
        self._computed = RunningMean()  # share of prompt tokens that were, the others being cached
        self._decode = RunningMean()  # seconds per output token
        self._outputs = RunningMean()  # tokens of an answer
        self._interval = RunningMean(INTERVAL_WEIGHT)  # seconds between samples that end, while there is work
        self._samples = 0
        self._heard_at = self._ended_at = 0.0

    def work_begins(self, now: float) -> None:
        """The engine was idle until now: the time before does not count as an interval."""
        self._ended_at = now

    def finished(self, event: Finished, now: float) -> None:
        """A sample ended."""
        usage, timings = event.usage, event.timings
        self._interval.add(max(0.0, now - self._ended_at))
        self._ended_at = now
        computed = usage.prompt_tokens - usage.cached_tokens
        if event.index == 0 and usage.output_tokens:
            self._computed.add(computed / max(1, usage.prompt_tokens))
            if computed >= LEAST_PROMPT:
                self._prefill.add(timings.prefill_ms / 1e3 / computed)
        if usage.output_tokens > 1:
            self._decode.add(timings.decode_ms / 1e3 / (usage.output_tokens - 1))
        if event.reason in _CUT_SHORT:
            return
        if usage.output_tokens:
            self._outputs.add(usage.output_tokens)
        self._samples += 1
        self._heard_at = now

    def known(self, now: float) -> bool:
        """Whether anything may be concluded."""
        return self._samples >= LEAST_SAMPLES and now - self._heard_at < STALE_S

    @property
    def interval_s(self) -> float | None:
        """Seconds between samples that end while there is work; None: unknown."""
        return self._interval.value

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute prompts of so many tokens, of which as many are cached as lately; 0 while unknown."""
        return tokens * (self._computed.value or 0.0) * (self._prefill.value or 0.0)

    def decode_s(self, tokens: float) -> float:
        """Seconds for so many output tokens of one sample; 0 while unknown."""
        return tokens * (self._decode.value or 0.0)

    def likely_output(self, at_least: int, at_most: int | None) -> float:
        """How long an answer within these bounds is, going by the others."""
        likely = max(float(at_least), self._outputs.value or 0.0)
        return likely if at_most is None else min(likely, at_most)
