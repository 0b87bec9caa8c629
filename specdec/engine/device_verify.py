"""Verify on a GPU: forward, sampling, acceptance and KV move are queued together; the host waits once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.tree import MAX_NODES, TokenTree
from specdec.core.types import TokenLogprobs
from specdec.engine.scheduler import PlanEntry
from specdec.engine.verify import Acceptance, StepRows, StepVerifier
from specdec.errors import StageError
from specdec.models.decoder import check_batch
from specdec.models.device_decoder import DeviceDecoder
from specdec.models.device_step import HostMirror, StepArrays
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.gpu import sampling
from verify_kernels.gpu.accept import AcceptResult, accept
from verify_kernels.gpu.kv_ops import move_kv
from verify_kernels.gpu.sampling_table import SamplingNeeds, SamplingPlan, SamplingTable, SamplingWorkspace
from verify_kernels.sampling import NO_TOKEN, RowSampling, SamplingPolicy, SequenceEdits


@dataclass(frozen=True, slots=True)
class DeviceOutputs:
    """Results of one tier of steps."""

    accepted: AcceptResult
    tokens: Tensor
    """int32 [samples]"""
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    """Those of the tokens, float64 [samples]; the best tokens, int32 [samples, top], and theirs, float64
    [samples, top]. None: not requested."""
    mirror: HostMirror
    """Copies in CPU memory."""

    @staticmethod
    def allocate(entries: int, samples: int, top: int | None, max_depth: int, device: torch.device) -> DeviceOutputs:
        """top: number of best tokens per row; None: no log-probabilities."""
        accepted = AcceptResult.allocate(entries, max_depth, device)
        tokens = torch.full((samples,), NO_TOKEN, dtype=torch.int32, device=device)
        logprobs = None
        if top is not None:
            logprobs = (
                torch.zeros(samples, dtype=torch.float64, device=device),
                torch.zeros(samples, top, dtype=torch.int32, device=device),
                torch.zeros(samples, top, dtype=torch.float64, device=device),
            )
        return DeviceOutputs(accepted, tokens, logprobs, HostMirror([accepted.for_host, *(logprobs or ())]))

    def accepted_rows(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Counts [entries]; rows and emitted tokens [entries, max_depth + 1], see `AcceptResult`."""
        flat: NDArray[Any] = self.mirror.arrays[0]
        entries, width = self.accepted.rows.shape
        rows, emitted = flat[entries:].reshape(2, entries, width)
        return flat[:entries], rows, emitted

    def logprobs_of(self, sample: int, top: int) -> tuple[float, list[tuple[int, float]]]:
        """The log-probability of a sample's token, and the best ``top`` tokens with theirs."""
        _, chosen, ids, values = self.mirror.arrays
        pairs = zip(ids[sample, :top].tolist(), values[sample, :top].tolist(), strict=True)
        return float(chosen[sample]), [pair for pair in pairs if pair[0] != NO_TOKEN]


class DeviceVerifier(StepVerifier):
    """The verifier of a GPU, with the same tokens as `specdec.engine.verify.Verifier` for the same logits.

    Every node is sampled, not only those on the accepted path, so that the host does not wait at each level. A node
    that the request's grammar or filters exclude cannot be reached, whatever is sampled there.
    """

    overlaps = True
    _decoder: DeviceDecoder

    def __init__(self, decoder: DeviceDecoder) -> None:
        super().__init__(decoder)
        samples, device = decoder.max_logit_rows, decoder.device
        self._workspace = SamplingWorkspace.allocate(samples, SamplingPlan.of(decoder.config.vocab_size), device)
        self._outputs: dict[tuple[int, int, int | None], DeviceOutputs] = {}

    def start(self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> Callable[[], list[Acceptance]]:
        """See `StepVerifier.start`."""
        rows = StepRows.of(entries, trees)
        self._entry_start = rows.batch.entry_start
        tops = [entry.seq.request.output.logprobs for entry in entries]
        faults: dict[int, StageError] = {}
        outputs = self.queue(rows, partial(_samplings, entries, trees, faults), tops)
        return partial(_accepted, outputs, rows, tops, faults)

    def queue(self, rows: StepRows, samplings: Callable[[], list[RowSampling]], tops: Seq[int | None]) -> DeviceOutputs:
        """Queue a step without waiting for it (`HostMirror.wait`).

        samplings: returns them by logit row; it is called while the device computes the forward. tops: by entry, the
        number of best tokens to report; None: no log-probabilities.
        """
        decoder = self._decoder
        check_batch(decoder, rows.batch, rows.logit_rows)
        step = decoder.buffer.load(rows.batch, rows.logit_rows, rows.roots, rows.offsets)
        # Two graphs, so that another kind of sampling captures no forward again. Both read at addresses of the tier.
        decoder.graphs.run(("forward", step.tier), partial(decoder.network.forward, step))
        top = max(
            (top for top, root in zip(tops, rows.roots, strict=True) if top is not None and root >= 0), default=None
        )
        outputs = self._outputs_of(step.tier.entries, step.tier.samples, top)
        if step.tier.samples:
            table, needs = decoder.buffer.load_table(step.tier.samples, samplings())
            logits = decoder.network.logits(step.tier.samples)
            work = partial(self.decide, step, table, needs, logits, outputs)
            decoder.graphs.run(("decide", step.tier, needs, top), work)
        outputs.mirror.end_step()
        return outputs

    def _outputs_of(self, entries: int, samples: int, top: int | None) -> DeviceOutputs:
        key = (entries, samples, top)
        if key not in self._outputs:
            self._outputs[key] = DeviceOutputs.allocate(entries, samples, top, MAX_NODES - 1, self._decoder.device)
        return self._outputs[key]

    def decide(
        self, step: StepArrays, table: SamplingTable, needs: SamplingNeeds, logits: Tensor, outputs: DeviceOutputs
    ) -> None:
        """Queue the rest of a step: sample every logit row, accept, move the accepted KV, copy to the host."""
        pool = self._decoder.pool
        sampling.sample(logits, table, needs, self._workspace, outputs.tokens)
        if outputs.logprobs is not None:
            sampling.logprobs(logits, outputs.tokens, self._workspace, *outputs.logprobs)
        result = outputs.accepted
        accept(step, step.root_row, step.tokens, outputs.tokens, step.sample_start, result, n_pages=pool.pages)
        move_kv(pool.k, pool.v, result.move_source, result.move_target, result.n_moves)
        outputs.mirror.copy()


def _samplings(
    entries: Seq[PlanEntry], trees: Seq[TokenTree | None], faults: dict[int, StageError]
) -> list[RowSampling]:
    """The sampling of each logit row. Adds to ``faults``, by entry, why it could not be made.

    Rows of a faulty entry are sampled greedily, and their results are ignored.
    """
    rows: list[RowSampling] = []
    for i, (entry, tree) in enumerate(zip(entries, trees, strict=True)):
        if tree is None:
            continue
        seq, paths = entry.seq, _paths(tree)
        position, n_output = len(seq.tokens), seq.n_output
        try:
            rows += [seq.sampling.row(position + len(path), path, n_output + len(path)) for path in paths]
        except Exception as error:
            faults[i] = StageError.of(error, "sampling")
            rows += [RowSampling(SamplingPolicy(0, temperature=0.0), position)] * len(paths)
    return rows


def _paths(tree: TokenTree) -> list[list[int]]:
    """Tokens from the root's child down to each node."""
    paths: list[list[int]] = [[]]
    for node in range(1, len(tree)):
        paths.append([*paths[tree.parents[node]], tree.tokens[node]])
    return paths


def _accepted(
    outputs: DeviceOutputs, rows: StepRows, tops: Seq[int | None], faults: Mapping[int, StageError]
) -> list[Acceptance]:
    """Wait for the device; returns its results by entry."""
    found = [Acceptance() for _ in rows.roots]
    if not rows.logit_rows:
        return found
    outputs.mirror.wait()
    counts, nodes, emitted = outputs.accepted_rows()
    for i, root in enumerate(rows.roots):
        if root < 0:
            continue
        if i in faults:
            found[i].fault = faults[i]
            continue
        acceptance, count = found[i], int(counts[i])
        acceptance.nodes = [row - root for row in nodes[i, 1:count].tolist()]
        acceptance.tokens = emitted[i, :count].tolist()
        if acceptance.tokens[-1] == NO_TOKEN:
            acceptance.broken = True
            acceptance.tokens.pop()
        top = tops[i]
        if top is not None:
            at = [rows.offsets[i] + node for node in (0, *acceptance.nodes)]
            acceptance.logprobs = [
                TokenLogprobs(token, *outputs.logprobs_of(sample, top))
                for token, sample in zip(acceptance.tokens, at, strict=False)
            ]
    return found


TREE_SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of one sequence's steps, and of many sequences' together
POLICIES = (
    SamplingPolicy(0, temperature=0.0),
    SamplingPolicy(0, temperature=1.0),
    SamplingPolicy(0, temperature=1.0, top_p=0.9),
)
RUNS = 3  # one compiles, one captures, one replays
TOP = 5  # log-probabilities per row, as most clients request


def warm_up(verifier: DeviceVerifier, decoder: DeviceDecoder) -> None:
    """Compile the kernels and capture the graphs of common steps of one sequence, and of prefill.

    Masks, penalties and log-probabilities are rarer: their kernels are compiled for one size. Writes to the pool's
    first pages, so no sequence may exist yet.
    """
    for rows in (size for size in TREE_SIZES if size <= decoder.max_logit_rows):
        for policy in POLICIES:
            for _ in range(RUNS):
                _run(verifier, rows, [RowSampling(policy, PAGE_SIZE)] * rows)
    for policy in POLICIES:
        _run(verifier, 1, [edited(policy, decoder.config.vocab_size)], TOP)
    most = min(decoder.max_rows, decoder.pool.pages * PAGE_SIZE, decoder.max_positions)
    _run(verifier, most, [])


def edited(policy: SamplingPolicy, vocab: int) -> RowSampling:
    """A row sampling with every edit that a request can ask for."""
    everything = np.full(-(-vocab // 32), 2**32 - 1, np.uint32)
    bias, first = np.ones(1, np.float32), np.zeros(1, np.int32)
    edits = SequenceEdits(first, bias, everything, first, [0])
    return RowSampling(dataclasses.replace(policy, repetition_penalty=1.1), PAGE_SIZE, edits, (0, 1), ban=True)


def _run(verifier: DeviceVerifier, rows: int, samplings: list[RowSampling], top: int | None = None) -> None:
    """Run one chain of ``rows`` rows: a tree if it is sampled, else a prompt."""
    entry = BatchEntry([0] * rows, range(-1, rows - 1), 0, list(range(-(-rows // PAGE_SIZE))))
    sampled = list(range(len(samplings)))
    step = StepRows(ForwardBatch.build([entry]), sampled, [0], [0 if sampled else -1])
    outputs = verifier.queue(step, lambda: samplings, [top])
    if sampled:
        outputs.mirror.wait()
