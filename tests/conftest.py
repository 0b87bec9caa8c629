"""Shared test set-up: one torch thread, deterministic hypothesis profiles."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "specdec", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("specdec")
