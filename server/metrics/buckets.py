"""Bounds of the histograms. Speculation answers in milliseconds, so they begin below one."""

from __future__ import annotations

LATENCY_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0,
)  # fmt: skip
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CHUNK_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
SAMPLES = (1, 2, 4, 8, 16, 32, 64)
