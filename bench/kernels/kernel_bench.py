"""Runs all GPU benchmarks, and judges their figures by the aims: ``python -m bench.kernels.kernel_bench``."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.kernels.attention import CASES, COMPARED, AttentionCase, attention_figures, rival_figures
from bench.kernels.step import StepFigures
from bench.kernels.timer import KernelTimer, device_facts, peak_bandwidth
from specdec.config import DeviceDtype, EngineConfig, KvDtype, SpeculationConfig
from specdec.engine.build import assemble
from specdec.engine.build_device import DevicePlatform
from verify_kernels.backend_selection import load_kernels

ReadFigures = Callable[[Mapping[str, Any]], Iterator[tuple[float, str]]]


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on one measure of a report."""

    measure: str
    part: str  # prefix of the cases that the measure needs
    bound: float
    figures: ReadFigures  # report -> (figure, case)
    least: bool = False  # whether ``bound`` is a lower bound
    skipped: str = ""  # field of the part's figures with the reason for a missing one

    def judged(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """The entry of `aims`, for the worst figure."""
        found = list(self.figures(report))
        line = {"measure": self.measure, "aim": f"{'>=' if self.least else '<='} {self.bound:g}"}
        if not found:
            return {**line, "figure": None, "met": None, "note": f"not measured: {self._why_not(report)}"}
        figure, case = min(found) if self.least else max(found)
        met = figure >= self.bound if self.least else figure <= self.bound
        target = {step["target"] for step in report.get("steps", [])} if self.part.startswith("steps") else set()
        return {**line, "figure": round(figure, 4), "met": met, "note": ", ".join([case, *sorted(target)])}

    def _why_not(self, report: Mapping[str, Any]) -> str:
        figures = report.get(self.part.split()[0], [])
        reasons = [line[self.skipped] for line in figures if line.get(self.skipped)]
        reasons += [f"{error['case']}: {error['message']}" for error in report["errors"] if self._rests(error["case"])]
        return reasons[0] if reasons else "the benchmarks did not reach it, or have no such case"

    def _rests(self, case: str) -> bool:
        return case.startswith(self.part) or self.part.startswith(case)


Report = Mapping[str, Any]
Found = Iterator[tuple[float, str]]
STEP = "steps auto auto"  # case name of the 16-bit step
MANY = 1 << 20  # token-heads: batch x KV heads x context
MOST_ROWS, VERIFIED = 64, 32


def aims(report: Report) -> list[dict[str, Any]]:
    """Judge each aim: ``measure``, ``aim``, ``figure`` (the worst one, or None), ``met``, and ``note`` (the figure's
    case, or why there is no figure)."""
    return [aim.judged(report) for aim in AIMS]


def _many_heads(report: Report) -> Found:
    for case, figures in _cases(report):
        keys = min(case.context, case.window) if case.window else case.context
        if case.batch * case.kv_heads * keys >= MANY:
            yield figures["bandwidth_share"], case.name


def _long_context(report: Report) -> Found:
    for case, figures in _cases(report):
        if case == AttentionCase(1, 32768, 16):
            yield figures["bandwidth_share"], case.name


def _nodes_over_row(report: Report) -> Found:
    times = {case: figures["us"] for case, figures in _cases(report)}
    for case, took in times.items():
        alone = replace(case, nodes=1)
        if case.nodes == 16 and alone in times:
            yield took / times[alone], case.name


def _cases(report: Report) -> Iterator[tuple[AttentionCase, Mapping[str, Any]]]:
    by_name = {case.name: case for case in CASES}
    for figures in report.get("attention", []):
        if figures["name"] in by_name:
            yield by_name[figures["name"]], figures


def _over(rival: str, report: Report) -> Found:
    for figures in report.get("rivals", []):
        if f"{rival}_over_ours" in figures:
            yield figures[f"{rival}_over_ours"], figures["name"]


def _step(report: Report, part: str) -> Any:
    """A part of the 16-bit step, for which the aims are stated; empty if it was not measured."""
    for step in report.get("steps", []):
        if (step["device_dtype"], step["kv_dtype"]) == ("auto", "auto"):
            return step[part] or {}
    return {}


def _rows_over_one(report: Report) -> Found:
    for line in _step(report, "forwards"):
        if line["rows"] == VERIFIED:
            yield line["over_one_row"], f"{VERIFIED} rows"


def _step_bandwidth(report: Report) -> Found:
    for line in _step(report, "forwards"):
        if line["rows"] <= VERIFIED:
            yield line["bandwidth_share"], f"{line['rows']} rows"


def _over_fastest(report: Report) -> Found:
    for line in _step(report, "forwards"):
        if line["rows"] <= MOST_ROWS and "over_fastest" in line:
            yield (
                line["over_fastest"],
                f"{line['rows']} rows; fastest: the library's linear layers where they are faster",
            )


def _prefill(report: Report) -> Found:
    prefill = _step(report, "prefill")
    if prefill:
        yield prefill["share_of_products"], f"{prefill['rows']} rows"


def _host_gap(report: Report) -> Found:
    for mode in ("off", "on"):
        if mode in _step(report, "engine"):
            yield _step(report, "engine")[mode]["host_gap_between_steps"], f"speculation {mode}"


def _tail(report: Report) -> Found:
    tail = _step(report, "tail")
    for name in ("greedy", "sampled"):
        if tail.get(f"{name}_moves"):  # without moves the figure is not comparable
            yield tail[f"{name}_us"], f"{name}, {tail['entries']} trees of {tail['nodes']} nodes"


def _speed_up(report: Report) -> Found:
    engine = _step(report, "engine")
    if "speed_up" in engine:
        yield engine["speed_up"], ", ".join(engine["drafters"])


AIMS = (
    Aim("tree_attention, batch x kv_heads x context >= 1M token-heads: share of HBM bandwidth by the bytes-moved bound",
        "attention", 0.80, _many_heads, least=True),
    Aim("batch 1, context 32k, 16 nodes, 8 kv heads, head_dim 128: share of HBM bandwidth", "attention", 0.60,
        _long_context, least=True),
    Aim("16-node tree against the same kernel with 1 row", "attention", 1.10, _nodes_over_row),
    Aim("FlashInfer's custom-mask prefill on the same trees, over ours", "rivals", 1.5,
        partial(_over, "flashinfer"), least=True, skipped="flashinfer_skipped"),
    Aim("verify of 32 rows, 8B shape, batch 1, 4k context, against 1 row", STEP + " forwards", 1.08, _rows_over_one),
    Aim("one verify step, 8B shape, batch 1: weight and KV bytes over HBM bandwidth", STEP + " forwards", 0.80,
        _step_bandwidth, least=True),
    Aim("prefill, 8B shape: operations per second over the library's in a large product of 16 bits",
        STEP + " prefill", 0.60, _prefill, least=True),
    Aim("host gap between steps", STEP + " engine", 0.03, _host_gap),
    Aim("accept + sampling + KV move, microseconds per step at batch 8", STEP + " tail", 60.0, _tail),
    Aim("bitwise mode against the fastest mode, step time at <= 64 rows", STEP + " forwards", 1.10, _over_fastest),
    Aim("speed-up with oracle:0.8 at batch 1, 8B shape", STEP + " engine", 3.0, _speed_up, least=True),
)  # fmt: skip


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
        self.report["aims"] = aims(self.report)

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
            self.report["aims"] = aims(self.report)
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
    for line in bench.report["aims"]:
        print(f"{line['measure']}: {line['figure']} (aim {line['aim']}), {line['note']}", flush=True)
    return 1 if bench.report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
