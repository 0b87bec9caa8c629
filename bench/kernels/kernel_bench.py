"""Everything there is to measure on a GPU, in order of worth, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.kernels.attention_bench import attention_figures
from bench.kernels.attention_case import CASES, COMPARED, AttentionCase
from bench.kernels.device_facts import device_facts, peak_bandwidth
from bench.kernels.kernel_timer import KernelTimer
from bench.kernels.linear_bench import KINDS, LLAMA_8B, linear_figures
from bench.kernels.rivals import rival_figures
from bench.kernels.step_figures import StepFigures
from specdec.config import EngineConfig, SpeculationConfig
from specdec.config.engine_config import DeviceDtype, KvDtype
from specdec.engine.build_device import build_device_parts
from verify_kernels.gpu.linear_tiles import LinearKind
from verify_kernels.kernels import load_kernels

Say = Callable[[str], None]
# The share of the time after which a part begins no further measurement, in the order they come; what one leaves the
# next may have.
UNTIL = {"attention": 0.25, "steps": 0.65, "rivals": 0.85, "linear": 1.0}
STEPS: tuple[tuple[DeviceDtype, KvDtype], ...] = (("auto", "auto"), ("fp8", "auto"), ("auto", "fp8"))


class KernelBench:
    """``target``: whose step is measured. Each part has its share of the ``seconds``; what no time is left for is named
    in the report's ``left_out``, and ``spent`` says what each took. ``say`` gets a line after each measurement, when
    the report holds it."""

    def __init__(self, device: torch.device, target: str, seconds: float, say: Say) -> None:
        self._device, self._target, self._say = device, target, say
        self._began, self._seconds = time.monotonic(), seconds
        self._timer = KernelTimer(device)
        self._peak, _ = peak_bandwidth(device)
        self.report: dict[str, Any] = {"facts": device_facts(device), "left_out": [], "spent": {}}

    def run(self, context: int = 4096, cases: tuple[AttentionCase, ...] = CASES) -> dict[str, Any]:
        """The report, as plain values."""
        self._part("attention", cases, lambda c: [attention_figures(c, self._timer, self._device, self._peak)])
        self._part("steps", STEPS, lambda types: [self._steps(types[0], types[1], context)])
        self._part("rivals", COMPARED, lambda c: [rival_figures(c, self._timer, self._device)])
        layers = [(n, k, kind) for kind in KINDS for n, k in LLAMA_8B]
        self._part("linear", layers, lambda layer: self._linear(*layer))
        return self.report

    def _part(self, name: str, items: Any, figures: Callable[[Any], list[dict[str, Any]]]) -> None:
        self.report[name] = []
        began, ends = time.monotonic(), self._began + UNTIL[name] * self._seconds
        for item in items:
            if time.monotonic() > ends:
                self.report["left_out"].append(f"{name} {item}")
                continue
            found = figures(item)
            self.report[name] += found
            self.report["spent"][name] = round(time.monotonic() - began, 1)
            for line in found:
                self._say(f"{name}: {line}")

    def _linear(self, n: int, k: int, kind: LinearKind) -> list[dict[str, Any]]:
        return linear_figures(n, k, kind, self._timer, self._device, self._peak)

    def _steps(self, dtype: DeviceDtype, kv_dtype: KvDtype, context: int) -> dict[str, Any]:
        speculation = SpeculationConfig(drafters=("oracle:0.8",), profile_s=0, fixed_nodes=8, fixed_depth=8)
        config = EngineConfig(
            target=self._target, device_dtype=dtype, kv_dtype=kv_dtype, kernels="reference",
            cache_dir=Path("~/.cache/specdec"), max_context=context + 64, kv_tokens=8 * (context + 128), max_batch=8,
            speculation=speculation,
        )  # fmt: skip
        parts = build_device_parts(config, self._device, load_kernels("reference", config.cache_dir, 1), 1)
        figures = StepFigures(parts, self._timer, self._peak, context)
        return {
            "target": parts.info.target, "dtype": parts.info.dtype, "kv_dtype": kv_dtype,
            "numeric_mode": parts.info.numeric_mode, "context": context, "forwards": figures.forwards(),
            "tail": figures.tail(), "engine": figures.engine(),
        }  # fmt: skip
