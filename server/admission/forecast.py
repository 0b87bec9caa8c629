"""When a request would be done."""

from __future__ import annotations

from dataclasses import dataclass

from server.admission.rates import Rates
from specdec.types import Request


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the engine does before a request or beside it. ``waiting_tokens`` are of the prompts of
    ``waiting_sequences``, which go first; ``free_places`` of the batch (negative never)."""

    waiting_sequences: int
    waiting_tokens: int
    free_places: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until a request is first computed, and from then on until it is done."""

    wait_s: float
    own_s: float

    @property
    def total_s(self) -> float:
        """From now until it is done."""
        return self.wait_s + self.own_s


def forecast(request: Request, ahead: Ahead, rates: Rates) -> Forecast:
    """How ``request`` would fare at the measured rates.

    Places come free one per interval between ends; prompts ahead are computed one after the other; whichever of the
    two takes longer holds it up.
    """
    missing = max(0, ahead.waiting_sequences + request.sampling.n - ahead.free_places)
    for_place_s = missing * (rates.interval_s or 0.0)
    wait_s = max(for_place_s, rates.prefill_s(ahead.waiting_tokens))
    prefill_s = rates.prefill_s(len(request.prompt_ids))
    stopping = request.stopping
    if stopping.ignore_eos and stopping.max_tokens is not None and not (stopping.stop or stopping.stop_token_ids):
        tokens = float(stopping.max_tokens)
    else:
        tokens = rates.likely_output(stopping.min_tokens, stopping.max_tokens)
    return Forecast(wait_s, prefill_s + rates.decode_s(max(0.0, tokens - 1)))
