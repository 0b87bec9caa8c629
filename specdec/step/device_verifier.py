"""Verify on a GPU: forward, sampling of all nodes, walk and KV move are queued as one; only the walks come back."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from torch import Tensor

from specdec.models.device.device_decoder import DeviceDecoder
from specdec.models.device.pending_result import PendingResult
from specdec.models.device.step_arrays import StepArrays
from specdec.sampling import NO_TOKEN, RowSampling
from specdec.scheduler import PlanEntry
from specdec.step.device_outputs import DeviceOutputs
from specdec.step.sequence_state import SequenceState
from specdec.step.step_rows import StepRows
from specdec.step.walk import Walk
from specdec.tree import MAX_NODES, TokenTree
from specdec.types import TokenLogprobs
from verify_kernels.gpu import sampling
from verify_kernels.gpu.accept import accept
from verify_kernels.gpu.kv_ops import move_kv
from verify_kernels.gpu.sampling_needs import SamplingNeeds
from verify_kernels.gpu.sampling_plan import SamplingPlan
from verify_kernels.gpu.sampling_table import SamplingTable
from verify_kernels.gpu.sampling_workspace import SamplingWorkspace


class DeviceVerifier:
    """As `specdec.step.verifier.Verifier`, with the same tokens for the same logits.

    Every node is sampled, not only those on the way down: the host would have to wait at each level else. A node that
    its request's grammar or filters rule out can not be reached, whatever is sampled there.
    """

    overlaps = True

    def __init__(self, decoder: DeviceDecoder) -> None:
        self._decoder = decoder
        samples, device = decoder.max_logit_rows, decoder.device
        self._workspace = SamplingWorkspace.allocate(samples, SamplingPlan.of(decoder.config.vocab_size), device)
        self._outputs: dict[tuple[int, int, int | None], DeviceOutputs] = {}
        self._first_rows: list[int] = []  # of the last run's entries

    @property
    def taps(self) -> bool:
        """Whether the target keeps hidden states for a feature head."""
        return bool(self._decoder.taps)

    def features(self, index: int, chain: int, walk: Walk, count: int) -> Tensor:
        """Hidden states of the last run's entry ``index``: its ``chain`` prompt rows, the root, the accepted path; the
        first ``count`` of them, float32 [count, taps * hidden]."""
        first = self._first_rows[index]
        rows = [*range(first, first + chain + 1), *(first + chain + node for node in walk.nodes)]
        return self._decoder.tapped[rows[:count]].float().cpu()

    def start(
        self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None], states: Seq[SequenceState]
    ) -> Callable[[], list[Walk]]:
        """Queue all of a step; what is returned waits for it, and gives one Walk per entry."""
        rows = StepRows.of(entries, trees)
        self._first_rows = rows.first_rows
        tops = [state.sequence.request.output.logprobs for state in states]
        outputs, pending = self.queue(rows, _samplings(trees, states), tops)
        return partial(_walks, outputs, pending, rows, tops)

    def queue(
        self, rows: StepRows, samplings: list[RowSampling], tops: Seq[int | None]
    ) -> tuple[DeviceOutputs, PendingResult]:
        """All of a step, without a wait for it. samplings: of each of the logit rows; tops: per entry, how many of the
        best tokens are wanted beside its log-probabilities, None for none of these."""
        decoder = self._decoder
        decoder.check(rows.batch, rows.logit_rows)
        step, needs = decoder.buffer.load(rows.batch, rows.logit_rows, rows.roots, rows.offsets, samplings)
        top = max(
            (top for top, root in zip(tops, rows.roots, strict=True) if top is not None and root >= 0), default=None
        )
        outputs = self._outputs_of(step.tier.entries, step.tier.samples, top)
        decoder.graphs.run(("step", step.tier, needs, top), partial(self._launch, step, needs, outputs))
        return outputs, PendingResult(outputs.mirror, decoder.device)

    def _outputs_of(self, entries: int, samples: int, top: int | None) -> DeviceOutputs:
        key = (entries, samples, top)
        if key not in self._outputs:
            self._outputs[key] = DeviceOutputs.allocate(entries, samples, top, MAX_NODES - 1, self._decoder.device)
        return self._outputs[key]

    def _launch(self, step: StepArrays, needs: SamplingNeeds, outputs: DeviceOutputs) -> None:
        network = self._decoder.network
        network.hidden(step)
        if step.table is not None:
            self.decide(step, step.table, needs, network.logits(step), outputs)

    def decide(
        self, step: StepArrays, table: SamplingTable, needs: SamplingNeeds, logits: Tensor, outputs: DeviceOutputs
    ) -> None:
        """Queue what follows a forward: sample every logit row, walk, move the accepted KV, copy to the host."""
        pool = self._decoder.pool
        sampling.sample(logits, table, needs, self._workspace, outputs.tokens)
        if outputs.ids is not None and outputs.chosen is not None and outputs.values is not None:
            sampling.logprobs(logits, outputs.tokens, self._workspace, outputs.chosen, outputs.ids, outputs.values)
        result = outputs.accepted
        accept(
            step.entry_start, step.entry_ctx, step.root_row, step.parent, step.tokens, outputs.tokens, step.page_table,
            result, max_nodes=MAX_NODES, n_pages=pool.pages, sample_start=step.sample_start,
        )  # fmt: skip
        move_kv(pool.k, pool.v, result.move_source, result.move_target, result.n_moves)
        outputs.mirror.copy()


def _samplings(trees: Seq[TokenTree | None], states: Seq[SequenceState]) -> list[RowSampling]:
    """How each node of each tree is sampled, in the order of the logit rows."""
    rows: list[RowSampling] = []
    for tree, state in zip(trees, states, strict=True):
        if tree is None:
            continue
        sequence, paths = state.sequence, [[]] if len(tree) == 1 else _paths(tree)
        position, n_output = len(sequence.tokens), sequence.n_output
        rows += [state.sampling.row(position + len(path), path, n_output + len(path)) for path in paths]
    return rows


def _paths(tree: TokenTree) -> list[list[int]]:
    """Tokens from the root's child down to each node."""
    paths: list[list[int]] = [[]]
    for node in range(1, len(tree)):
        paths.append([*paths[tree.parents[node]], tree.tokens[node]])
    return paths


def _walks(outputs: DeviceOutputs, pending: PendingResult, rows: StepRows, tops: Seq[int | None]) -> list[Walk]:
    """What the device found, per entry."""
    walks = [Walk() for _ in rows.roots]
    if not rows.logit_rows:
        return walks
    pending.read()
    counts, nodes, emitted = outputs.walks()
    for i, root in enumerate(rows.roots):
        if root < 0:
            continue
        walk, count = walks[i], int(counts[i])
        walk.nodes = [row - root for row in nodes[i, 1:count].tolist()]
        walk.tokens = emitted[i, :count].tolist()
        if walk.tokens[-1] == NO_TOKEN:
            walk.broken = True
            walk.tokens.pop()
        top = tops[i]
        if top is not None:
            at = [rows.offsets[i] + node for node in (0, *walk.nodes)]
            walk.logprobs = [
                TokenLogprobs(token, *outputs.logprobs(sample, top))
                for token, sample in zip(walk.tokens, at, strict=False)
            ]
    return walks
