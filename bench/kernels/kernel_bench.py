"""Runs all GPU benchmarks: ``python -m bench.kernels.kernel_bench``."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.kernels.attention import CASES, COMPARED, attention_figures, rival_figures
from bench.kernels.step import StepFigures
from bench.kernels.timer import KernelTimer, device_facts, peak_bandwidth
from specdec.config import DeviceDtype, EngineConfig, KvDtype, SpeculationConfig
from specdec.engine.build import assemble
from specdec.engine.build_device import DevicePlatform
from verify_kernels.backend_selection import load_kernels

Say = Callable[[str], None]
Figures = list[dict[str, Any]]
PARTS = ("attention", "steps", "rivals")
STEPS: tuple[tuple[DeviceDtype, KvDtype], ...] = (("auto", "auto"), ("fp8", "auto"), ("auto", "fp8"))
MOST_STEP_ROWS = 2048  # of a prompt
FRAMES = 4  # innermost stack frames of an error
MOST_SAID = 500  # characters of an error message


class KernelBench:
    """Runs the benchmarks on ``device``.

    target: the model whose steps are measured. say: receives a line after each measurement. The report lists failed
    measurements under ``errors``.
    """

    def __init__(self, device: torch.device, target: str, say: Say) -> None:
        self._device, self._target, self._say = device, target, say
        self._timer = KernelTimer(device)
        self._peak, _ = peak_bandwidth(device)
        self.report: dict[str, Any] = {"facts": device_facts(device), "errors": []}

    def run(self, parts: Collection[str] = PARTS) -> dict[str, Any]:
        """Run ``parts`` and return the report, as JSON types."""
        work: dict[str, tuple[Any, Callable[[Any], Figures]]] = {
            "attention": (CASES, lambda c: [attention_figures(c, self._timer, self._device, self._peak)]),
            "steps": (STEPS, lambda types: self._steps(*types)),
            "rivals": (COMPARED, lambda c: [rival_figures(c, self._timer, self._device)]),
        }
        for name in PARTS:
            if name in parts:
                self._part(name, *work[name])
        return self.report

    def _part(self, name: str, items: Any, figures: Callable[[Any], Figures]) -> None:
        listed = self.report.setdefault(name, [])
        for item in items:
            found = self._tried(" ".join((name, *_words(item))), partial(figures, item)) or []
            listed += found
            for line in found:
                self._say(f"{name}: {line}")

    def _tried(self, case: str, work: Callable[[], Any]) -> Any:
        """The result of ``work``; None if it fails, which is recorded."""
        try:
            return work()
        except Exception as why:  # a failed benchmark does not stop the next one
            at = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(why.__traceback__)[-FRAMES:]]
            message = f"{type(why).__name__}: {why}"[:MOST_SAID]
            self.report["errors"].append({"case": case, "message": message, "at": at})
        self._say(f"{case} failed: {message}")
        return None

    def _steps(self, dtype: DeviceDtype, kv_dtype: KvDtype, context: int = 4096) -> Figures:
        speculation = SpeculationConfig(drafters=("oracle:0.8",), profile_s=0)
        config = EngineConfig(
            target=self._target, device_dtype=dtype, kv_dtype=kv_dtype, kernels="reference",
            cache_dir=Path("~/.cache/specdec"), max_context=context + 64, kv_tokens=8 * (context + 128), max_batch=32,
            max_step_rows=MOST_STEP_ROWS, speculation=speculation,
        )  # fmt: skip
        gc.collect()  # release the previous model before memory is counted
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        kernels = load_kernels("reference", config.cache_dir, 1)
        parts = assemble(config, DevicePlatform(config, self._device), kernels, 1)
        figures = StepFigures(parts, self._timer, self._peak, context)
        case = f"steps {dtype} {kv_dtype}"
        return [{
            "target": self._target, "device_dtype": dtype, "dtype": parts.info.dtype, "kv_dtype": kv_dtype,
            "numeric_mode": parts.info.numeric_mode, "context": context,
            "forwards": self._tried(f"{case} forwards", figures.forwards),
            "prefill": self._tried(f"{case} prefill", figures.prefill),
            "tail": self._tried(f"{case} tail", figures.tail),
            "engine": self._tried(f"{case} engine", figures.engine),
            "batches": self._tried(f"{case} batches", figures.batches),
        }]  # fmt: skip


def _words(item: Any) -> list[str]:
    """The name of a case in the report."""
    return [str(word) for word in item] if isinstance(item, tuple) else [str(getattr(item, "name", item))]


def main() -> int:
    """Measure, print each figure, write the report. Returns the exit code: 1 if a measurement failed, 2 without a
    GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.kernel_bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--target", default="random:llama-3.1-8b", help="model whose steps are measured")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU", file=sys.stderr)
        return 2

    def say(line: str) -> None:
        print(line, flush=True)
        save()  # keeps the figures if a later bench fails

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(bench.report, indent=1) + "\n", encoding="utf-8")

    bench = KernelBench(torch.device("cuda", 0), options.target, say)
    bench.run(options.only)
    save()
    return 1 if bench.report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
