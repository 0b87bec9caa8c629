"""The numbers of a request's sampling parameters that never change while it runs."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

MIN_TEMPERATURE = 1e-6  # below, logits of 1e30 would overflow float32 when divided by it
_RECORD = struct.Struct("<Qdfffffi")


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """How a sequence's tokens are chosen. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 are off.

    seed: unsigned 64-bit key of the sequence's noise. Penalties 1, 0, 0 are off.
    record: the leading 40 bytes of ``sd_sample_row`` in ``cpu/csrc/sampling.h``, packed once.

    Raises:
        ValueError: a number lies outside its range.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    record: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _need("seed", 0 <= self.seed < 1 << 64, "must be an unsigned 64-bit integer")
        in_range = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= 1 / MIN_TEMPERATURE
        _need("temperature", in_range, f"must be 0 or within [{MIN_TEMPERATURE}, {1 / MIN_TEMPERATURE:g}]")
        _need("top_k", 0 <= self.top_k < 1 << 31, "must be a non-negative 32-bit integer")
        _need("top_p", 0 <= self.top_p <= 1, "must be within [0, 1]")
        _need("min_p", 0 <= self.min_p <= 1, "must be within [0, 1]")
        repetition = 0 < self.repetition_penalty < math.inf
        _need("repetition_penalty", repetition, "must be positive and finite")
        _need("presence_penalty", math.isfinite(self.presence_penalty), "must be finite")
        _need("frequency_penalty", math.isfinite(self.frequency_penalty), "must be finite")
        packed = _RECORD.pack(
            self.seed, self.top_p, self.temperature, self.log_min_p, self.repetition_penalty,
            self.presence_penalty, self.frequency_penalty, self.top_k,
        )  # fmt: skip
        object.__setattr__(self, "record", packed)

    @property
    def log_min_p(self) -> float:
        """log(min_p); -inf when off."""
        return math.log(self.min_p) if self.min_p > 0 else -math.inf

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _need(name: str, ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {rule}")
