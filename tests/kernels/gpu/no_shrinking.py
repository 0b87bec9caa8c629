"""Phases of a hypothesis test whose examples are too slow to shrink."""

from __future__ import annotations

from hypothesis import Phase

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # interpreted kernels take seconds a step
