"""A model's bare forward: time by rows and context (`bench step`), perplexity by numeric type (`bench perplexity`)."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from bench.engine_bench import BenchError
from bench.machine import BandwidthProbe
from bench.workloads.workload import long_text
from specdec.core.types import Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.engine import Engine, EngineParts
from specdec.models.decoder import Decoder
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch


class TimedDecoder:
    """Replaces a `Decoder` in an engine; ``seconds`` is the duration of the last forward."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:  # all other attributes are the decoder's
        return getattr(self._decoder, name)

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        """As `Decoder.forward`."""
        began = time.perf_counter()
        result = self._decoder.forward(batch, logit_rows)
        self.seconds = time.perf_counter() - began
        return result


ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (256, 2048)


DEFINITIONS = {
    "bandwidth_fraction": "weight_bytes / row1_ms / read_bandwidth_gb_s",
    "rows8_over_rows1": "step_ms of 8 rows / step_ms of 1 row, at the shortest context",
}


def figures_of(
    weight_bytes: int, bandwidth: float, step_ms: dict[int, dict[int, float]], **more: float
) -> dict[str, Any]:
    """The medians of one run by name, as `--json` prints them. Ratios are computed from the rounded figures
    (`DEFINITIONS`).

    bandwidth: bytes per second of reading memory. step_ms: by context and rows, one forward with logits of every row.
    """
    shown = {str(c): {str(r): round(ms, 3) for r, ms in row.items()} for c, row in step_ms.items()}
    eight_over_one = {context: round(row["8"] / row["1"], 3) for context, row in shown.items()}
    first = next(iter(shown))
    gb_s, row1_ms = round(bandwidth / 1e9, 2), shown[first]["1"]
    return {
        "weight_bytes": weight_bytes,
        "read_bandwidth_gb_s": gb_s,
        "row1_ms": row1_ms,
        "bandwidth_fraction": round(weight_bytes / (row1_ms * 1e-3) / (gb_s * 1e9), 3),
        "rows8_over_rows1": eight_over_one[first],
        **{name: round(value, 3) for name, value in more.items()},
        **{f"rows8_over_rows1_at_{context}": ratio for context, ratio in eight_over_one.items()},
        "step_ms": shown,
        "definitions": DEFINITIONS,
    }


class StepBench:
    """Measures a loaded model.

    Raises:
        BenchError: the model is on a GPU.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        if parts.info.kernels == "triton":
            raise BenchError("engine.device: bench step measures the CPU's kernels; set it to cpu")
        self._decoder = cast(Decoder, parts.decoder)
        self._tokens = parts.tokenizer.encode(long_text())

    def run(self, repeats: int = 15, contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
        """All figures, as `figures_of`, for the contexts that fit; raises BenchError if none does."""
        fitting = sorted(c for c in contexts if c + max(ROWS) <= self._parts.info.max_context)
        if not fitting:
            raise BenchError(
                f"--context: {min(contexts)} and {max(ROWS)} rows do not fit the model's "
                f"{self._parts.info.max_context} tokens; give a shorter one, or a higher max_context"
            )
        self._fill(fitting[-1])
        bandwidth, step_ms = self._measure_steps(fitting, repeats)
        prefill = statistics.median(self._prefill() for _ in range(3))
        rest_ms, whole_ms = self._overhead()
        return figures_of(
            self._decoder.weights.nbytes, bandwidth, step_ms,
            prefill_tokens_per_s=prefill, not_forward_ms=rest_ms, engine_step_ms=whole_ms,
        )  # fmt: skip

    def _measure_steps(self, contexts: Sequence[int], repeats: int) -> tuple[float, dict[int, dict[int, float]]]:
        """Measure memory reads and steps of every shape in turns: the bandwidth of a shared machine drifts within
        seconds, and both terms of a ratio must see the same drift. Returns the medians."""
        probe = BandwidthProbe(self._parts.config.cache_dir, self._parts.info.threads)
        bandwidths: list[float] = []
        times: dict[int, dict[int, list[float]]] = {c: {r: [] for r in ROWS} for c in contexts}
        for repeat in range(-1, repeats):  # the first is a warm-up of every shape
            for context in contexts:
                for rows in ROWS:
                    bandwidth = probe.once()
                    step_ms = self._forward(context, rows)
                    if repeat >= 0:
                        bandwidths.append(bandwidth)
                        times[context][rows].append(step_ms)
        medians = {c: {r: statistics.median(ms) for r, ms in row.items()} for c, row in times.items()}
        return statistics.median(bandwidths), medians

    def _pages(self, tokens: int) -> list[int]:
        return list(range(-(-tokens // PAGE_SIZE)))

    def _fill(self, upto: int) -> None:
        """Fill the KV cache with real text, so that attention reads real keys."""
        chunk = self._parts.config.prefill_chunk
        for start in range(0, upto, chunk):
            tokens = self._text(start, min(chunk, upto - start))
            parents = list(range(-1, len(tokens) - 1))
            self._decoder.forward(
                ForwardBatch.build([BatchEntry(tokens, parents, start, self._pages(start + len(tokens)))]), []
            )

    def _text(self, start: int, count: int) -> list[int]:
        return [self._tokens[i % len(self._tokens)] for i in range(start, start + count)]

    def _forward(self, context: int, rows: int) -> float:
        """Milliseconds of one forward: a two-way tree of ``rows`` nodes at ``context``."""
        parents = [-1, *((i - 1) // 2 for i in range(1, rows))]
        entry = BatchEntry(self._text(context, rows), parents, context, self._pages(context + rows))
        batch = ForwardBatch.build([entry])
        began = time.perf_counter()
        self._decoder.forward(batch, range(rows))
        return (time.perf_counter() - began) * 1e3

    def _prefill(self) -> float:
        tokens = min(1024, self._parts.info.max_context - 1)
        began = time.perf_counter()
        self._fill(tokens)
        return tokens / (time.perf_counter() - began)

    def _overhead(self) -> tuple[float, float]:
        """Medians in ms over plain decode steps: the step without the forward, and the whole step."""
        timed = TimedDecoder(self._decoder)
        engine = Engine(dataclasses.replace(self._parts, decoder=cast(Decoder, timed)))
        request = Request(
            "bench",
            tuple(self._tokens[:64]),
            SamplingParams(temperature=0.0),
            StoppingParams(max_tokens=48, ignore_eos=True),
            speculation=SpeculationParams(SpeculationMode.OFF),
        )
        engine.submit(request)
        rest, whole = [], []
        while engine.has_work():
            began = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - began
            rest.append((seconds - timed.seconds) * 1e3)
            whole.append(seconds * 1e3)
        return statistics.median(rest[1:]), statistics.median(whole[1:])


CHUNK = 64


def perplexity(
    parts: EngineParts, tokens: int, window: int = 512, text: str | None = None, given: int = 1
) -> tuple[float, int]:
    """exp of the mean negative log-likelihood (nats) over about ``tokens`` tokens of ``text`` (None: real code), and
    the number of tokens that were scored.

    window: tokens per window. given: tokens at the start of each window that are not scored.

    Raises:
        BenchError: the model is on a GPU, a window is longer than its context, or no tokens are left to score.
    """
    if parts.info.kernels == "triton":
        raise BenchError("engine.device: bench perplexity measures the CPU's kernels; set it to cpu")
    ids = parts.tokenizer.encode(long_text() if text is None else text)
    longest, context = min(window + 1, len(ids)), parts.info.max_context
    if longest > context:
        raise BenchError(f"--window: must be below the model's context of {context} tokens")
    total, scored = 0.0, 0
    for start in range(0, min(tokens, len(ids) - 1), window):
        read = ids[start : start + window + 1]
        if len(read) > given:
            total += _window_nll(parts, read, given)
            scored += len(read) - given
    if not scored:
        raise BenchError("--given: must leave tokens of a window and of the text to score")
    return math.exp(total / scored), scored


def _window_nll(parts: EngineParts, window: list[int], given: int) -> float:
    pages = list(range(-(-len(window) // PAGE_SIZE)))
    nll = 0.0
    for at in range(0, len(window) - 1, CHUNK):
        rows = window[at : min(at + CHUNK, len(window) - 1)]
        batch = ForwardBatch.build([BatchEntry(rows, list(range(-1, len(rows) - 1)), at, pages)])
        logits = parts.decoder.forward(batch, range(len(rows)))
        first = max(0, given - 1 - at)  # row i predicts token at + i + 1
        targets = torch.tensor(window[at + 1 + first : at + 1 + len(rows)])
        if len(targets):
            nll += float(torch.nn.functional.cross_entropy(logits[first:], targets, reduction="sum"))
    return nll
