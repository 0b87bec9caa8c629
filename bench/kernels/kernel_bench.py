"""Everything there is to measure on a GPU, in order of worth, within a time."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.kernels.aims import aims
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
Figures = list[dict[str, Any]]
# The share of the time after which a part begins no further measurement, in the order they come: first what the aims
# are judged by, then the rest, whose figures are listed with those of the part of their name. What one leaves the next
# may have. A step's model takes half a minute to build, so no further one is begun late; rivals are compiled for long.
UNTIL = {"attention": 0.25, "steps": 0.65, "linear": 0.7, "rivals": 0.8, "more steps": 0.85, "more linear": 1.0}
STEPS: tuple[tuple[DeviceDtype, KvDtype], ...] = (("auto", "auto"), ("fp8", "auto"), ("auto", "fp8"))
LAYERS: tuple[tuple[int, int, LinearKind], ...] = tuple((n, k, kind) for kind in KINDS for n, k in LLAMA_8B)
FRAMES = 4  # of an error's stack, the innermost
MOST_SAID = 500  # characters of an error


class KernelBench:
    """``target``: whose step is measured. Each part has its share of the ``seconds``; what no time is left for is named
    in the report's ``left_out``, what failed in its ``errors``, and ``spent`` says what each part took. ``say`` gets a
    line after each measurement, when the report holds it. ``commit``: what is measured; git is asked where empty."""

    def __init__(self, device: torch.device, target: str, seconds: float, say: Say, commit: str = "") -> None:
        self._device, self._target, self._say = device, target, say
        self._began, self._seconds = time.monotonic(), seconds
        self._timer = KernelTimer(device)
        self._peak, _ = peak_bandwidth(device)
        self.report: dict[str, Any] = {"facts": device_facts(device, commit), "left_out": [], "errors": [], "spent": {}}
        self.report["aims"] = aims(self.report)

    def run(self, context: int = 4096, cases: tuple[AttentionCase, ...] = CASES) -> dict[str, Any]:
        """The report, as plain values."""
        self._part("attention", cases, lambda c: [attention_figures(c, self._timer, self._device, self._peak)])
        self._part("steps", STEPS[:1], lambda types: self._steps(types[0], types[1], context))
        self._part("linear", LAYERS[: len(LLAMA_8B)], lambda layer: self._linear(*layer))
        self._part("rivals", COMPARED, lambda c: [rival_figures(c, self._timer, self._device)])
        self._part("more steps", STEPS[1:], lambda types: self._steps(types[0], types[1], context))
        self._part("more linear", LAYERS[len(LLAMA_8B) :], lambda layer: self._linear(*layer))
        return self.report

    def _part(self, name: str, items: Any, figures: Callable[[Any], Figures]) -> None:
        listed = self.report.setdefault(name.removeprefix("more "), [])
        began, ends = time.monotonic(), self._began + UNTIL[name] * self._seconds
        for item in items:
            case = " ".join((name, *_words(item)))
            if time.monotonic() > ends:
                self.report["left_out"].append(case)
                continue
            found = self._tried(case, partial(figures, item)) or []
            listed += found
            self.report["spent"][name] = round(time.monotonic() - began, 1)
            self.report["aims"] = aims(self.report)
            for line in found:
                self._say(f"{name}: {line}")
        self.report["aims"] = aims(self.report)

    def _tried(self, case: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns; None where it fails, which is noted and ends nothing else."""
        try:
            return work()
        except Exception as why:  # whatever it is, what comes next may well run
            at = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(why.__traceback__)[-FRAMES:]]
            message = f"{type(why).__name__}: {why}"[:MOST_SAID]
            self.report["errors"].append({"case": case, "message": message, "at": at})
        self._say(f"{case} failed: {message}")
        return None

    def _linear(self, n: int, k: int, kind: LinearKind) -> Figures:
        return linear_figures(n, k, kind, self._timer, self._device, self._peak)

    def _steps(self, dtype: DeviceDtype, kv_dtype: KvDtype, context: int) -> Figures:
        speculation = SpeculationConfig(drafters=("oracle:0.8",), profile_s=0, fixed_nodes=8, fixed_depth=8)
        config = EngineConfig(
            target=self._target, device_dtype=dtype, kv_dtype=kv_dtype, kernels="reference",
            cache_dir=Path("~/.cache/specdec"), max_context=context + 64, kv_tokens=8 * (context + 128), max_batch=8,
            speculation=speculation,
        )  # fmt: skip
        gc.collect()  # the model before this one, before memory is counted
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        parts = build_device_parts(config, self._device, load_kernels("reference", config.cache_dir, 1), 1)
        figures = StepFigures(parts, self._timer, self._peak, context)
        case = " ".join(("steps" if (dtype, kv_dtype) == STEPS[0] else "more steps", dtype, kv_dtype))
        return [{
            "target": self._target, "device_dtype": dtype, "dtype": parts.info.dtype, "kv_dtype": kv_dtype,
            "numeric_mode": parts.info.numeric_mode, "context": context,
            "forwards": self._tried(f"{case} forwards", figures.forwards),
            "tail": self._tried(f"{case} tail", figures.tail),
            "engine": self._tried(f"{case} engine", figures.engine),
        }]  # fmt: skip


def _words(item: Any) -> list[str]:
    """How the report calls a case."""
    return [str(word) for word in item] if isinstance(item, tuple) else [str(getattr(item, "name", item))]
