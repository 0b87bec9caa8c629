"""Times whole steps of a model on a GPU, with our linear layers and with the vendor's library."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.kernels.attention import binary_tree
from bench.kernels.timer import KernelTimer, product_rate
from specdec.core.types import Delta, Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.device_verify import RUNS, DeviceOutputs, DeviceVerifier
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.verify import StepRows
from specdec.models.device_decoder import DeviceDecoder, DeviceNetwork, GraphCache
from specdec.models.device_weights import DenseLinear, DeviceLinear
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.sampling import RowSampling, SamplingPolicy


class LibraryLinear(DenseLinear):
    """A decoder layer that reuses another layer's weights, for timing only."""

    @staticmethod
    def of(dense: DeviceLinear) -> LibraryLinear:
        """The same layer by the library; only the order of additions differs."""
        assert isinstance(dense, DenseLinear)
        return LibraryLinear(dense.weight, dense._bias, dense._scratch)

    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """out = x W^T + bias + residual."""
        added = [tensor for tensor in (residual, self._bias) if tensor is not None]
        if any(tensor.dtype != x.dtype for tensor in (out, *added)):  # logits are float32
            out.copy_(torch.mm(x, self.weight.t()))
            for tensor in added:
                out.add_(tensor)
        elif not added:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(added[0], x, self.weight.t(), out=out)
            for tensor in added[1:]:
                out.add_(tensor)


def library_network(decoder: DeviceDecoder) -> DeviceNetwork | None:
    """The decoder's model with every linear layer by the library, over the same weights and KV; None if layers are
    quantised, which the library does not support."""
    weights = decoder.model.weights
    if not all(isinstance(each, DenseLinear) for layer in weights.layers for each in layer.linears):
        return None
    model = replace(decoder.model, weights=weights.with_linears(LibraryLinear.of))
    return DeviceNetwork(model, decoder.pool, decoder.buffer.tiers.largest, decoder.max_positions)


class NotedGraphs:
    """Wraps a decoder's graph cache and counts replays by key.

    With a ``timer`` it also times each key's work once, while that step's inputs are loaded; a repeated step is
    idempotent.
    """

    def __init__(self, inner: GraphCache, timer: KernelTimer | None = None) -> None:
        self._inner, self._timer = inner, timer
        self.counts: Counter[tuple[Hashable, ...]] = Counter()
        self.microseconds: dict[tuple[Hashable, ...], float] = {}

    def run(self, key: tuple[Hashable, ...], work: Callable[[], None]) -> None:
        """As `GraphCache.run`."""
        self._inner.run(key, work)
        self.counts[key] += 1
        if self._timer is not None and key not in self.microseconds:
            self.microseconds[key] = self._timer.microseconds(work, cold=False)


@contextmanager
def noted_graphs(decoder: DeviceDecoder, timer: KernelTimer | None = None) -> Iterator[NotedGraphs]:
    """Record what ``decoder`` runs during the block."""
    inner = decoder.graphs
    notes = NotedGraphs(inner, timer)
    decoder.graphs = cast(GraphCache, notes)
    try:
        yield notes
    finally:
        decoder.graphs = inner


ROWS = (1, 8, 16, 32, 64)
BATCHES, TREE = (1, 8, 32), 8  # sequences of a step; rows of each one's tree
STEP_RUNS = 20  # of which the mean is taken
MOST_KERNELS = 8  # that a step's figures name
TAIL_BATCH, TAIL_NODES = 8, 16
TAIL_SAMPLINGS = (("greedy", 0.0, 1.0), ("sampled", 0.8, 0.95))  # temperature, top_p
SPREAD = 3.0  # standard deviation of logits, as of random models
LIKELY, CERTAIN = 1, 40.0  # a token, and the logit with which it is always sampled
# Runs before the one that counts: in the first the oracle remembers the answer, in the second each kind of step runs
# without a graph, in the third its graph is captured.
ENGINE_RUNS = 3
ENGINE_NODES = 8  # draft nodes per tree, and draft tokens in a row, of the engine's figures


class StepFigures:
    """Measures the target of ``parts``, which must be on a GPU, over random KV."""

    def __init__(self, parts: EngineParts, timer: KernelTimer, peak: float, context: int) -> None:
        assert isinstance(parts.decoder, DeviceDecoder)
        self._parts, self._decoder, self._timer = parts, parts.decoder, timer
        self._peak, self._context = peak, context
        for pool in (self._decoder.pool.k, self._decoder.pool.v):
            for layer in pool:  # not all at once: float8 has no generator of its own
                layer.copy_(torch.randn(layer.shape, dtype=torch.float16, device=layer.device))

    def forwards(self) -> list[dict[str, Any]]:
        """By rows of one tree: microseconds, ratio to one row, and bytes of weights and KV as a share of the bandwidth.

        If the weights are not quantised, also the time with the library's linear layers, and ours over the faster one.
        """
        config, weights = self._decoder.config, self._decoder.model.weights.nbytes
        kv = 2 * self._context * config.kv_size * config.n_layers * self._decoder.pool.k.element_size()
        library = library_network(self._decoder)
        found: list[dict[str, Any]] = []
        for rows in (r for r in ROWS if r <= self._decoder.max_logit_rows):
            step = self._decoder.buffer.load(self._batch(1, rows), range(rows))
            took = self._timer.microseconds(partial(self._decoder.network.forward, step), cold=False)
            share = (weights + kv) / (took * 1e-6) / self._peak
            ratio = took / found[0]["us"] if found else 1.0
            found.append({"rows": rows, "us": took, "over_one_row": ratio, "bandwidth_share": share})
            if library is not None:
                theirs = self._timer.microseconds(partial(library.forward, step), cold=False)
                found[-1] |= {"library_us": theirs, "over_fastest": took / min(took, theirs)}
        return found

    def prefill(self) -> dict[str, Any]:
        """A prompt of the most rows that a step holds: microseconds, and operations per second as a share of what the
        library reaches in a large matrix product of 16 bits."""
        config, rows = self._decoder.config, self._decoder.max_rows
        weights = sum(each.n * each.k for layer in self._decoder.model.weights.layers for each in layer.linears)
        operations = 2 * rows * weights + 2 * rows * rows * config.q_size * config.n_layers  # half of all keys are seen
        pages = range(-(-rows // PAGE_SIZE))
        batch = ForwardBatch.build([BatchEntry([LIKELY] * rows, range(-1, rows - 1), 0, pages)])
        step = self._decoder.buffer.load(batch, [rows - 1])
        took = self._timer.microseconds(partial(self._decoder.network.forward, step), cold=False)
        found = {"rows": rows, "us": took, "share_of_products": operations / took * 1e6 / product_rate(self._timer)}
        library = library_network(self._decoder)
        if library is not None:
            found["library_us"] = self._timer.microseconds(partial(library.forward, step), cold=False)
        return found

    def batches(self) -> list[dict[str, Any]]:
        """Whole steps by number of sequences, each with a tree, as an engine runs them: see `profiled`; microseconds
        from the host's view; and bytes of weights and KV over the bandwidth, in microseconds."""
        decoder, found = self._decoder, []
        config, verifier = decoder.config, DeviceVerifier(decoder)
        for entries in (n for n in BATCHES if n <= decoder.buffer.tiers.largest.entries):
            rows = entries * TREE
            firsts = list(range(0, rows, TREE))
            step = StepRows(self._batch(entries, TREE), list(range(rows)), firsts, [0] * entries)
            samplings = [RowSampling(SamplingPolicy(0, temperature=0.0), 100)] * rows

            def once(step: StepRows = step, samplings: list[RowSampling] = samplings) -> None:
                verifier.queue(step, lambda: samplings, [None] * len(step.roots)).mirror.wait()

            for _ in range(RUNS):
                once()
            began = time.perf_counter()
            for _ in range(STEP_RUNS):
                once()
            took = (time.perf_counter() - began) / STEP_RUNS * 1e6
            kv = 2 * entries * self._context * config.kv_size * config.n_layers * decoder.pool.k.element_size()
            least = (decoder.model.weights.nbytes + kv) / self._peak * 1e6
            found.append({"entries": entries, "rows": rows, "us": took, "least_us": least, **profiled(once)})
        return found

    def tail(self) -> dict[str, Any]:
        """Microseconds of sampling, acceptance and KV move of a batch of trees, given its logits; and the number of
        moved slots. ``flat_``: the same for flat logits, where nothing is accepted."""
        entries = min(TAIL_BATCH, self._decoder.buffer.tiers.largest.entries)
        nodes = min(TAIL_NODES, self._decoder.max_logit_rows // entries)
        rows = entries * nodes
        found: dict[str, Any] = {"entries": entries, "nodes": nodes}
        verifier = DeviceVerifier(self._decoder)
        for name, temperature, top_p in TAIL_SAMPLINGS:
            samplings = [RowSampling(SamplingPolicy(row, temperature, top_p=top_p), 100) for row in range(rows)]
            firsts = list(range(0, rows, nodes))
            step = self._decoder.buffer.load(self._batch(entries, nodes), range(rows), [0] * entries, firsts)
            table, needs = self._decoder.buffer.load_table(step.tier.samples, samplings)
            outputs = DeviceOutputs.allocate(step.tier.entries, step.tier.samples, None, 63, self._decoder.device)
            logits = self._decoder.network.logits(step.tier.samples)
            work = partial(verifier.decide, step, table, needs, logits, outputs)
            _accepting(logits)
            found[f"{name}_us"] = self._timer.microseconds(work, cold=False)
            found[f"{name}_moves"] = int((outputs.accepted.move_source >= 0).sum())
            logits.normal_()
            found[f"flat_{name}_us"] = self._timer.microseconds(work, cold=False)
        return found

    def engine(self, tokens: int = 200) -> dict[str, Any]:
        """One request by plain decode, then with an oracle as drafter: milliseconds per token, tokens per step, the
        share of the time in which the device waits for the host, and the speed-up.

        The first runs of each only compile and capture; one after the measured run times each kind of step alone.
        """
        engine = Engine(replace(self._parts, costs=None))
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
        """Figures of the steps after the prompt; ``notes`` counts the same steps."""
        prompt = tuple(i % 251 for i in range(min(64, self._context)))
        engine.submit(
            Request(
                "bench", prompt, SamplingParams(temperature=0.0), StoppingParams(max_tokens=tokens, ignore_eos=True),
                speculation=SpeculationParams(mode, max_nodes=ENGINE_NODES, max_depth=ENGINE_NODES),
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
        tokens = [LIKELY if node % 2 else LIKELY + 1 for node in range(nodes)]  # the first sibling is likely
        pages = self._decoder.pool.pages
        return ForwardBatch.build(
            [
                BatchEntry(tokens, parents, self._context, [(e * each + i) % pages for i in range(each)])
                for e in range(entries)
            ]
        )


def profiled(work: Callable[[], object]) -> dict[str, Any]:
    """What ``work`` does on the GPU: kernels, copies, graphs launched, waits of the host, allocations of device memory,
    microseconds of kernels, and the kernels that take longest ("name count microseconds").

    A kernel's time includes its wait for the one before it, where it begins early. All zero without a GPU.
    """
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    before = torch.cuda.memory_stats()["allocation.all.allocated"] if on_gpu else 0
    with profile(activities=activities) as profiler:
        work()
    after = torch.cuda.memory_stats()["allocation.all.allocated"] if on_gpu else 0
    kernels: dict[str, list[float]] = {}
    copies, calls = 0, Counter[str]()
    for event in profiler.events() or ():
        if event.device_type != DeviceType.CUDA:
            calls[event.name] += 1
        elif event.name.startswith(("Memcpy", "Memset")):
            copies += 1
        else:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:MOST_KERNELS]
    return {
        "kernels": sum(map(len, kernels.values())),
        "copies": copies,
        "graphs": calls["cudaGraphLaunch"],
        "host_waits": calls["cudaEventSynchronize"] + calls["cudaStreamSynchronize"],
        "allocations": after - before,
        "kernels_us": sum(map(sum, kernels.values())),
        "longest": "; ".join(f"{name} {len(times)} {sum(times):.0f}" for name, times in longest),
    }


def _accepting(logits: Tensor) -> None:
    """Fill in logits with which every node's first child is accepted."""
    logits.normal_().mul_(SPREAD)
    logits[:, LIKELY] = CERTAIN


def _host_gap(figures: dict[str, float], notes: NotedGraphs, alone: NotedGraphs) -> dict[str, float]:
    """The device's time per step, and the share of a step in which the device is idle.

    alone: times of each kind of forward and of decision, from another run of the same request. A kind that did not
    occur there, because the controller decides by measured times, counts as the mean of the others.
    """
    device_ms = 0.0
    for part in ("forward", "decide"):  # a step has one of each
        counts = {key: n for key, n in notes.counts.items() if key[0] == part and key in alone.microseconds}
        device_us = sum(n * alone.microseconds[key] for key, n in counts.items())
        device_ms += device_us / max(sum(counts.values()), 1) / 1e3
    return {"device_ms_per_step": device_ms, "host_gap_between_steps": 1 - device_ms / figures["ms_per_step"]}
