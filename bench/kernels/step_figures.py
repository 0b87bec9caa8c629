"""A whole step of a model on a GPU: the forward by rows, what follows it, and the engine around both."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernels.attention_work import binary_tree
from bench.kernels.kernel_timer import KernelTimer
from bench.kernels.library_linear import library_network
from bench.kernels.noted_graphs import NotedGraphs, noted_graphs
from specdec.engine.engine import Engine, EngineParts
from specdec.models.device.device_decoder import DeviceDecoder
from specdec.models.device.device_network import DeviceNetwork
from specdec.models.device.step_arrays import StepArrays
from specdec.step.device_outputs import DeviceOutputs
from specdec.step.device_verifier import DeviceVerifier
from specdec.types import Delta, Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.row_sampling import RowSampling
from verify_kernels.sampling_policy import SamplingPolicy

ROWS = (1, 8, 16, 32, 64)
TAIL_BATCH, TAIL_NODES = 8, 16
TAIL_SAMPLINGS = (("greedy", 0.0, 1.0), ("sampled", 0.8, 0.95))  # temperature, top_p
# The target's logits as those of the random models, and one that wins whatever is drawn
SPREAD, LIKELY, CERTAIN = 3.0, 1, 40.0
# In the first with drafts the oracle has nothing to remember, in the second kinds of step that come once run as they
# are, in the third they are recorded; only then is all of a run replayed.
ENGINE_RUNS = 3


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
        """By rows of one tree: microseconds, over those of one row, weights and KV as a share of the bandwidth, and,
        where weights are not quantised, the same step with the library's linear layers and ours over the faster."""
        config, weights = self._decoder.config, self._decoder.model.weights.nbytes
        kv = 2 * self._context * config.kv_size * config.n_layers * self._decoder.pool.k.element_size()
        library = library_network(self._decoder)
        found: list[dict[str, Any]] = []
        for rows in (r for r in ROWS if r <= self._decoder.max_logit_rows):
            step, _ = self._decoder.buffer.load(self._batch(1, rows), range(rows))
            took = self._timer.microseconds(partial(_forward, self._decoder.network, step), cold=False)
            share = (weights + kv) / (took * 1e-6) / self._peak
            ratio = took / found[0]["us"] if found else 1.0
            found.append({"rows": rows, "us": took, "over_one_row": ratio, "bandwidth_share": share})
            if library is not None:
                theirs = self._timer.microseconds(partial(_forward, library, step), cold=False)
                found[-1] |= {"library_us": theirs, "over_fastest": took / min(took, theirs)}
        return found

    def tail(self) -> dict[str, Any]:
        """Sampling, walk and KV move of a batch of trees, once its logits are there: where a path down each tree is
        accepted, by how many slots then move, and where logits are flat and nothing is."""
        entries = min(TAIL_BATCH, self._decoder.buffer.tiers.largest.entries)
        nodes = min(TAIL_NODES, self._decoder.max_logit_rows // entries)
        rows = entries * nodes
        found: dict[str, Any] = {"entries": entries, "nodes": nodes}
        verifier = DeviceVerifier(self._decoder)
        for name, temperature, top_p in TAIL_SAMPLINGS:
            samplings = [RowSampling(SamplingPolicy(row, temperature, top_p=top_p), 100) for row in range(rows)]
            firsts = list(range(0, rows, nodes))
            step, needs = self._decoder.buffer.load(
                self._batch(entries, nodes), range(rows), [0] * entries, firsts, samplings
            )
            assert step.table is not None
            outputs = DeviceOutputs.allocate(step.tier.entries, step.tier.samples, None, 63, self._decoder.device)
            logits = self._decoder.network.logits_of(step.tier.samples)
            work = partial(verifier.decide, step, step.table, needs, logits, outputs)
            _accepting(logits)
            found[f"{name}_us"] = self._timer.microseconds(work, cold=False)
            found[f"{name}_moves"] = int((outputs.accepted.move_source >= 0).sum())
            logits.normal_()
            found[f"flat_{name}_us"] = self._timer.microseconds(work, cold=False)
        return found

    def engine(self, tokens: int = 200) -> dict[str, Any]:
        """One request by plain decode, then as an oracle remembers it: milliseconds per token, tokens per step, the
        share of the time in which the device waits for the next step, and the speed-up. The first runs of each only
        compile and record; the last, after the one that counts, times each kind of step without the host."""
        engine = Engine(dataclasses.replace(self._parts, costs=None))
        found: dict[str, Any] = {"drafters": list(self._parts.info.drafters)}
        for name, mode in (("off", SpeculationMode.OFF), ("on", SpeculationMode.ON)):
            for _ in range(ENGINE_RUNS):
                self._decode(engine, mode, tokens)
            with noted_graphs(self._decoder) as notes:
                found[name] = self._decode(engine, mode, tokens, notes)
            with noted_graphs(self._decoder, self._timer) as alone:
                self._decode(engine, mode, tokens)
            found[name] |= _host_gap(found[name], notes, alone)
        found["speed_up"] = found["off"]["ms_per_token"] / found["on"]["ms_per_token"]
        return found

    def _decode(
        self, engine: Engine, mode: SpeculationMode, tokens: int, notes: NotedGraphs | None = None
    ) -> dict[str, float]:
        """``notes`` then hold the steps after the prompt alone, which are those that the figures are of."""
        prompt = tuple(i % 251 for i in range(min(64, self._context)))
        engine.submit(
            Request(
                "bench", prompt, SamplingParams(temperature=0.0), StoppingParams(max_tokens=tokens, ignore_eos=True),
                speculation=SpeculationParams(mode),
            )
        )  # fmt: skip
        steps = emitted = 0
        began = 0.0
        while engine.has_work():
            events = engine.step()
            if began and engine.last_step is not None:
                steps += 1
                emitted += sum(len(event.token_ids) for event in events if isinstance(event, Delta))
            elif any(isinstance(event, Delta) for event in events):
                began = time.perf_counter()  # the prompt is done
                if notes is not None:
                    notes.counts.clear()
        wall_ms = (time.perf_counter() - began) * 1e3
        return {
            "ms_per_token": wall_ms / max(emitted, 1),
            "tokens_per_step": emitted / max(steps, 1),
            "ms_per_step": wall_ms / max(steps, 1),
        }

    def _batch(self, entries: int, nodes: int) -> ForwardBatch:
        each = -(-(self._context + nodes) // PAGE_SIZE)
        parents = binary_tree(nodes)
        tokens = [LIKELY if node % 2 else LIKELY + 1 for node in range(nodes)]  # of siblings the first is likely
        pages = self._decoder.pool.pages
        return ForwardBatch.build(
            [
                BatchEntry(tokens, parents, self._context, [(e * each + i) % pages for i in range(each)])
                for e in range(entries)
            ]
        )


def _forward(network: DeviceNetwork, step: StepArrays) -> None:
    network.hidden(step)
    network.logits(step)


def _accepting(logits: Tensor) -> None:
    """Logits by which every node's first child is accepted."""
    logits.normal_().mul_(SPREAD)
    logits[:, LIKELY] = CERTAIN


def _host_gap(figures: dict[str, float], notes: NotedGraphs, alone: NotedGraphs) -> dict[str, float]:
    """Share of a step in which the device has nothing of it to do. ``alone`` is of another run of the same request; a
    kind of step that did not come in it, as the controller decides by the clock, counts as the mean of the others."""
    known = {key: count for key, count in notes.counts.items() if key in alone.microseconds}
    steps = max(sum(known.values()), 1)
    device_ms = sum(count * alone.microseconds[key] for key, count in known.items()) / steps / 1e3
    return {"device_ms_per_step": device_ms, "host_gap_between_steps": 1 - device_ms / figures["ms_per_step"]}
