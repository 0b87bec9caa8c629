"""Drafts with a small model of the target's vocabulary: level by level, by the target's own noise."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from draft.protocol import DraftTask
from specdec.models.decoder import Decoder
from specdec.sampling import Sampler
from specdec.sequence import Sequence
from specdec.tree import TokenTree
from verify_kernels.forward_batch import BatchEntry, ForwardBatch


@dataclass(slots=True)
class _Growing:
    """A tree being grown: ``frontier`` are the nodes to expand next, at most one level apart from the leaves."""

    task: DraftTask
    tree: TokenTree
    frontier: list[int]


class ModelDrafter:
    """Proposes the top-w of log q / T + G under the request's own filters, where G is the noise the target will
    use: a without-replacement sample ordered by the chance of holding the target's choice (Daliri et al.,
    arXiv 2408.07978). With T = 0 these are simply the w likeliest tokens.

    Its KV lies in its own pool under the shared page table: slot s of a sequence is slot s in both. Committed
    tokens that it has not seen (a prompt, an accepted run) are fed as a chain before the first level; on a CPU
    those rows cost next to nothing, so nothing is ever moved. A level feeds the whole tree so far again, for the
    same reason.
    """

    name = "model"

    def __init__(self, decoder: Decoder, sampler: Sampler) -> None:
        self._decoder, self._sampler = decoder, sampler

    def begin(self, sequence: Sequence) -> None:
        """Nothing to do: a prefix hit has set ``draft_computed`` already."""

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Nothing to do: `propose` reads the committed tokens."""

    def rewind(self, sequence: Sequence) -> None:
        """Nothing to do: the scheduler has reset ``draft_computed`` with the pages."""

    def end(self, sequence: Sequence) -> None:
        """Nothing to do: the pages are the scheduler's."""

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Catch up with the committed tokens, then grow every tree by levels until its budget is used."""
        trees = [TokenTree(task.sequence.tokens[-1]) for task in tasks]
        growing = self._catch_up(tasks, trees)
        while growing:
            growing = self._grow(growing)
        return trees

    def _catch_up(self, tasks: Seq[DraftTask], trees: Seq[TokenTree]) -> list[_Growing]:
        """Feed committed tokens; sequences that reached their pending token and may draft start to grow."""
        room = self._decoder.max_rows
        entries, last_rows, ready, computed, row = [], [], [], [], 0
        for task, tree in zip(tasks, trees, strict=True):
            seq = task.sequence
            if max(seq.tokens) >= self._decoder.config.vocab_size:
                continue  # a padding id of the target's larger table: this model has no row for it
            drafts = task.max_nodes > 0 and task.max_depth > 0
            # While the target is still prefilling, only slots it has pages for can be filled.
            upto = len(seq.tokens) if drafts else min(len(seq.tokens) - 1, seq.n_computed)
            chain = seq.tokens[min(seq.draft_computed, len(seq.tokens) - 1) : upto][: room - row]
            if not chain:
                continue
            start = min(seq.draft_computed, len(seq.tokens) - 1)
            entries.append(BatchEntry(chain, list(range(-1, len(chain) - 1)), start, seq.pages))
            row += len(chain)
            computed.append((seq, min(start + len(chain), len(seq.tokens) - 1)))
            if start + len(chain) == len(seq.tokens) and drafts:
                last_rows.append(row - 1)
                ready.append(_Growing(task, tree, [0]))
        if not entries:
            return []
        logits = self._decoder.forward(ForwardBatch.build(entries), last_rows)
        for seq, upto in computed:  # only now is it true
            seq.draft_computed = upto
        return self._expand(ready, logits)

    def _grow(self, growing: Seq[_Growing]) -> list[_Growing]:
        """One level: feed every tree, expand its frontier."""
        entries, rows, row, fed = [], [], 0, []
        for item in growing:
            seq, tree = item.task.sequence, item.tree
            if row + len(tree) > self._decoder.max_rows:
                continue
            entries.append(BatchEntry(tree.tokens, tree.parents, len(seq.tokens) - 1, seq.pages))
            rows += [row + node for node in item.frontier]
            row += len(tree)
            fed.append(item)
        if not entries:
            return []
        return self._expand(fed, self._decoder.forward(ForwardBatch.build(entries), rows))

    def _expand(self, growing: Seq[_Growing], logits: Tensor) -> list[_Growing]:
        """Give frontier nodes their children, best first, within each budget; returns those that can go on."""
        if not growing:
            return []
        width = max(item.task.width for item in growing)
        rows = []
        for item in growing:
            seq = item.task.sequence
            for node in item.frontier:
                path = item.tree.path_tokens(node)
                rows.append(item.task.sampling.row(len(seq.tokens) + len(path), path, seq.n_output + len(path)))
        children = self._sampler.children(logits, rows, width)
        following, at = [], 0
        for item in growing:
            own = children[at : at + len(item.frontier)]
            at += len(item.frontier)
            item.frontier = self._add(item, own)
            room = len(item.tree) - 1 < item.task.max_nodes
            if room and item.frontier and item.tree.depths[item.frontier[0]] < item.task.max_depth:
                following.append(item)
        return following

    def _add(self, item: _Growing, children: Seq[Seq[tuple[int, float]]]) -> list[int]:
        """Add the best of the level's children, leaving room for deeper levels; returns the new nodes."""
        tree, task = item.tree, item.task
        left = task.max_nodes - (len(tree) - 1)
        levels_left = task.max_depth - tree.depths[item.frontier[0]]
        share = max(1, left // max(1, levels_left)) if levels_left > 1 else left
        offered = [
            (tree.scores[node] + logprob, rank, node, token)
            for node, options in zip(item.frontier, children, strict=True)
            for rank, (token, logprob) in enumerate(options[: task.width])
        ]
        # The first-ranked child holds the target's choice most often, whatever its probability.
        offered.sort(key=lambda o: (o[1], -o[0]))
        return [tree.add(node, token, score, self.name) for score, _, node, token in offered[: min(share, left)]]
