"""A whole step of a model on a GPU: the forward by rows, what follows it, and the engine around both."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any

import torch

from bench.kernels.attention_work import binary_tree
from bench.kernels.kernel_timer import WARM_RUNS, KernelTimer
from specdec.engine.engine import Engine, EngineParts
from specdec.models.device.device_decoder import DeviceDecoder
from specdec.models.device.step_arrays import StepArrays
from specdec.step.device_outputs import DeviceOutputs
from specdec.step.device_verifier import DeviceVerifier
from specdec.types import Delta, Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.row_sampling import RowSampling
from verify_kernels.sampling_policy import SamplingPolicy

ROWS = (1, 8, 16, 32, 64)
TAIL_BATCH, TAIL_NODES = 8, 16


class StepFigures:
    """Measures the target of ``parts``, which must be on a device. Its KV is noise, its graphs are its own."""

    def __init__(self, parts: EngineParts, timer: KernelTimer, peak: float, context: int) -> None:
        assert isinstance(parts.decoder, DeviceDecoder)
        self._parts, self._decoder, self._timer = parts, parts.decoder, timer
        self._peak, self._context = peak, context
        for pool in (self._decoder.pool.k, self._decoder.pool.v):
            for layer in pool:  # not all at once: float8 has no generator of its own
                layer.copy_(torch.randn(layer.shape, dtype=torch.float16, device=layer.device))

    def forwards(self) -> list[dict[str, Any]]:
        """By rows of one tree: microseconds, over those of one row, and weights and KV as a share of the bandwidth."""
        config, weights = self._decoder.config, self._decoder.model.weights.nbytes
        kv = 2 * self._context * config.kv_size * config.n_layers * self._decoder.pool.k.element_size()
        found: list[dict[str, Any]] = []
        for rows in (r for r in ROWS if r <= self._decoder.max_logit_rows):
            step, _ = self._decoder.buffer.load(self._batch(1, rows), range(rows))
            took = self._timer.microseconds(partial(self._forward, step), cold=False)
            share = (weights + kv) / (took * 1e-6) / self._peak
            ratio = took / found[0]["us"] if found else 1.0
            found.append({"rows": rows, "us": took, "over_one_row": ratio, "bandwidth_share": share})
        return found

    def tail(self) -> dict[str, Any]:
        """Sampling, walk and KV move of a batch of trees, once its logits are there."""
        entries = min(TAIL_BATCH, self._decoder.buffer.tiers.largest.entries)
        nodes = min(TAIL_NODES, self._decoder.max_logit_rows // entries)
        rows = entries * nodes
        found: dict[str, Any] = {"entries": entries, "nodes": nodes}
        verifier = DeviceVerifier(self._decoder)
        for name, temperature, top_p in (("greedy", 0.0, 1.0), ("sampled", 0.8, 0.95)):
            samplings = [RowSampling(SamplingPolicy(row, temperature, top_p=top_p), 100) for row in range(rows)]
            firsts = list(range(0, rows, nodes))
            step, needs = self._decoder.buffer.load(
                self._batch(entries, nodes), range(rows), [0] * entries, firsts, samplings
            )
            assert step.table is not None
            outputs = DeviceOutputs.allocate(step.tier.entries, step.tier.samples, None, 63, self._decoder.device)
            logits = self._decoder.network.logits_of(step.tier.samples).normal_()
            work = partial(verifier.decide, step, step.table, needs, logits, outputs)
            found[f"{name}_us"] = self._timer.microseconds(work, cold=False)
        return found

    def engine(self, tokens: int = 200) -> dict[str, Any]:
        """One request by plain decode, then as an oracle remembers it: milliseconds per token, tokens per step, what of
        the time is spent outside the verifier, and the speed-up. The first runs of each only compile and record."""
        engine = Engine(dataclasses.replace(self._parts, costs=None))
        found: dict[str, Any] = {"drafters": list(self._parts.info.drafters)}
        for name, mode in (("off", SpeculationMode.OFF), ("on", SpeculationMode.ON)):
            for _ in range(WARM_RUNS):
                self._decode(engine, mode, tokens)
            found[name] = self._decode(engine, mode, tokens)
        found["speed_up"] = found["off"]["ms_per_token"] / found["on"]["ms_per_token"]
        return found

    def _decode(self, engine: Engine, mode: SpeculationMode, tokens: int) -> dict[str, float]:
        prompt = tuple(i % 251 for i in range(min(64, self._context)))
        engine.submit(
            Request(
                "bench", prompt, SamplingParams(temperature=0.0), StoppingParams(max_tokens=tokens, ignore_eos=True),
                speculation=SpeculationParams(mode),
            )
        )  # fmt: skip
        steps = emitted = 0
        verify_ms = 0.0
        began = 0.0
        while engine.has_work():
            events = engine.step()
            if began and engine.last_step is not None:
                verify_ms += engine.last_step.verify_ms
                steps += 1
                emitted += sum(len(event.token_ids) for event in events if isinstance(event, Delta))
            elif any(isinstance(event, Delta) for event in events):
                began = time.perf_counter()  # the prompt is done
        wall_ms = (time.perf_counter() - began) * 1e3
        return {
            "ms_per_token": wall_ms / max(emitted, 1),
            "tokens_per_step": emitted / max(steps, 1),
            "ms_per_step": wall_ms / max(steps, 1),
            "outside_verify_share": 1 - verify_ms / wall_ms,
        }

    def _forward(self, step: StepArrays) -> None:
        self._decoder.network.hidden(step)
        self._decoder.network.logits(step)

    def _batch(self, entries: int, nodes: int) -> ForwardBatch:
        each = -(-(self._context + nodes) // PAGE_SIZE)
        parents = binary_tree(nodes)
        pages = self._decoder.pool.pages
        return ForwardBatch.build(
            [
                BatchEntry([1] * nodes, parents, self._context, [(e * each + i) % pages for i in range(each)])
                for e in range(entries)
            ]
        )
