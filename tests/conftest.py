"""Shared test set-up: one torch thread, deterministic hypothesis profiles, Triton interpreted where no GPU is."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

torch.set_num_threads(1)
settings.register_profile(
    "specdec", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("specdec")
