"""Drafts with an EAGLE-3 feature head: decoder layers, mostly one, over the target's hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from draft.growth import MASKED_LOGIT, Growth, add_children, worth_expanding
from draft.head_checkpoint import HeadModel
from draft.protocol import DraftTask, ModelBasedDrafter
from specdec.core.kv_cache import extend_keys
from specdec.core.sampling import Sampler
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.models.decoder import BatchLimits, KvPool, check_batch, output_and_mlp, rope_tables
from verify_kernels.backend import AttentionSpec, Backend, LayerSpec, LinearSpec
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.packed_weights import PackedLinear
from verify_kernels.reference.backend import rms_norm

MAX_LOGIT_ROWS = 64  # rows expanded in one forward: a level of 16 trees of `WIDEST_LEVEL` nodes each


class HeadNetwork:
    """The layers of a head over a `ForwardBatch` (Li et al., arXiv 2503.01840).

    Slot i of a sequence holds the hidden state x_i of token i (`fuse` of the target's features; for a drafted token the
    z of the previous slot) and the embedding of token i + 1. It predicts token i + 2:

        e = RMS(embed(token i + 1)), g = RMS(x_i), y = x_i + attention([e; g]), z = y + MLP(RMS(y)),
        logits = lm_head(RMS(z))

    Further layers are plain decoder layers from z to z. EAGLE-3.1 norms the features before `fuse`'s matrix, and passes
    RMS(z) on instead of z. The KV of a slot depends on its own pair and position only; in further layers on its context
    too. Results are views, valid until the next call.
    """

    def __init__(self, head: HeadModel, backend: Backend, pool: KvPool, *, max_rows: int, max_positions: int) -> None:
        c = head.config.model
        self.head, self.pool = head, pool
        self.config = replace(c, vocab_size=head.embed.shape[0])  # the limits that `check_batch` applies
        self.max_rows, self.max_logit_rows = max_rows, min(max_rows, MAX_LOGIT_ROWS)
        self.max_positions = max_positions
        self._backend = backend
        backend.reserve(max_rows, max(head.fc.k, 2 * c.hidden_size, c.intermediate_size, c.q_size), c.q_size)
        self._features = torch.zeros(max_rows, head.fc.k)
        self._fused, self._x, self._embedded = (torch.zeros(max_rows, c.hidden_size) for _ in range(3))
        self._pair = torch.zeros(max_rows, 2 * c.hidden_size)
        self._qkv = torch.zeros(max_rows, c.q_size + 2 * c.kv_size)
        self._attended = torch.zeros(max_rows, c.q_size)
        self._chosen = torch.zeros(self.max_logit_rows, c.q_size)
        self._z = torch.zeros(self.max_logit_rows, c.hidden_size)
        self._gate_up = torch.zeros(self.max_logit_rows, 2 * c.intermediate_size)
        self._draft_logits = torch.zeros(self.max_logit_rows, head.lm_head.n)
        self._logits = self._draft_logits
        if head.target_ids is not None:
            self._logits = torch.full((self.max_logit_rows, head.target_vocab), MASKED_LOGIT)
        self._fc = backend.bind(LinearSpec(head.fc, self._features, self._fused))
        self._to_attended = backend.bind(*self._layers())
        self._to_logits = backend.bind(
            *output_and_mlp(c, head.layers[-1], self._chosen, self._z, self._gate_up),
            self._normed(head.lm_head, self._z, self._draft_logits, head.final_norm),
        )

    def _normed(self, weight: PackedLinear, src: Tensor, dst: Tensor, norm: Tensor) -> LinearSpec:
        return LinearSpec(weight, src, dst, "rms", "store", norm, None, self.head.config.model.norm_eps)

    def _layers(self) -> Iterator[LayerSpec]:
        """All up to the last attention, for all rows: what follows it is for the chosen ones."""
        c, layers = self.head.config.model, self.head.layers
        cos, sin = rope_tables(c.rope, c.head_dim, self.max_positions, local=False)
        gate_up = torch.zeros(self.max_rows if layers[1:] else 0, 2 * c.intermediate_size)
        for at, layer in enumerate(layers):
            if at:
                yield from output_and_mlp(c, layers[at - 1], self._attended, self._x, gate_up)
                yield self._normed(layer.qkv, self._x, self._qkv, layer.attn_norm)
            else:
                yield LinearSpec(layer.qkv, self._pair, self._qkv)
            yield AttentionSpec(
                n_heads=c.n_heads, n_kv_heads=c.n_kv_heads, head_dim=c.head_dim, scale=c.attn_scale, eps=c.norm_eps,
                window=0, q_norm=layer.q_norm, k_norm=layer.k_norm, cos=cos, sin=sin, qkv=self._qkv,
                out=self._attended, kv=self.pool.tensors.layer(at),
            )  # fmt: skip

    def fuse(self, features: Tensor) -> Tensor:
        """x, float32 [n, hidden], of the target's features, float32 [n, layers * target hidden], n <= ``max_rows``.

        Raises:
            ValueError: ``features`` has another width, or too many rows.
        """
        rows, width = features.shape
        if width != self._features.shape[1] or rows > self.max_rows:
            raise ValueError(f"features: [{rows}, {width}], the head takes [<= {self.max_rows}, {self.head.fc.k}]")
        norm = self.head.features_norm
        if norm is not None:
            parts = features.reshape(rows, *norm.shape)
            features = rms_norm(parts, norm, self.head.config.model.norm_eps).view(rows, width)
        self._features[:rows].copy_(features)
        self._fc(rows)
        return self._fused[:rows]

    def forward(self, batch: ForwardBatch, hidden: Tensor, chosen: Seq[int]) -> tuple[Tensor, Tensor]:
        """Write every row's KV; returns logits, float32 [n, target vocabulary], and z, [n, hidden], of rows ``chosen``.

        z is normed if `HeadConfig.output_normed` says so.

        batch.tokens: the *next* token of each slot. hidden: float32 [rows, hidden], the x of each slot.

        Raises:
            ValueError: more rows or positions than the buffers hold, or an id out of range.
        """
        check_batch(self, batch, chosen)
        head, rows, h, eps = self.head, batch.rows, self._x.shape[1], self.head.config.model.norm_eps
        self._backend.embed(head.embed, batch.tokens, 1.0, self._embedded)
        self._pair[:rows, :h].copy_(rms_norm(self._embedded[:rows], head.embed_norm, eps))
        self._pair[:rows, h:].copy_(rms_norm(hidden, head.layers[0].attn_norm, eps))
        self._x[:rows].copy_(self._pair[:rows, h:] if head.config.residual_normed else hidden)
        self._to_attended(rows, batch)
        n = len(chosen)
        if n:
            for source, out in ((self._attended, self._chosen), (self._x, self._z)):
                # "clip": in the default mode numpy writes to a buffer first
                np.take(source.numpy(), chosen, axis=0, out=out.numpy()[:n], mode="clip")
            self._to_logits(n)
            if head.target_ids is not None:
                self._logits[:n].index_copy_(1, head.target_ids, self._draft_logits[:n])
            if head.config.output_normed:
                self._z[:n].copy_(rms_norm(self._z[:n], head.final_norm, eps))
        return self._logits[:n], self._z[:n]


@dataclass(slots=True)
class HeadContext:
    """The head's state of a sequence: slots with KV, and features that are not computed yet."""

    first_page: int = 0  # page of the sequence at which the head's KV begins
    filled: int = 0  # end of the slots with KV
    pending: list[Tensor] = field(default_factory=list)  # float32 [n, width] each: features of the next positions
    n_pending: int = 0  # their number
    root: Tensor | None = None  # float32 [hidden]: x of the last slot with KV, if this context computed it

    @property
    def known(self) -> int:
        """The first position without features."""
        return self.filled + self.n_pending

    def restart(self, first_page: int, filled: int) -> None:
        """Drop the context; the slots from ``first_page`` to ``filled`` hold KV."""
        self.first_page, self.filled = first_page, filled
        self.pending, self.n_pending, self.root = [], 0, None

    def append(self, rows: Tensor) -> None:
        """Append features of the next positions; copies them."""
        self.pending.append(rows.clone())
        self.n_pending += rows.shape[0]

    def take(self, n: int) -> Tensor:
        """Remove and return the first ``n`` pending features."""
        rows = self.pending[0] if len(self.pending) == 1 else torch.cat(self.pending)
        self.pending = [rows[n:]] if n < self.n_pending else []
        self.n_pending -= n
        return rows[:n]


class HeadPages:
    """Which pages are full of head KV: per page the key of the tokens up to its end, and its context's first page.

    The scheduler may give a page to another sequence without notice. The record stays correct, since only the head
    writes to its pool: a page holds what its key says until the head writes to it again.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[bytes, int]] = {}

    def written(self, pages: Seq[int], low: int, high: int) -> None:
        """Forget the pages of slots [low, high), which are about to be written. pages: the sequence's."""
        for depth in range(low // PAGE_SIZE, -(-high // PAGE_SIZE)):
            self._held.pop(pages[depth], None)

    def filled(self, page: int, key: bytes, first_page: int) -> None:
        """Record that ``page`` is full, in a context that began at page ``first_page`` of its sequence."""
        self._held[page] = (key, first_page)

    def first_page(self, pages: Seq[int], keys: Seq[bytes]) -> int | None:
        """First page of the context that ends with ``pages``, a sequence's leading pages with these ``keys``.

        None if the last page, or one between, holds no KV of these tokens.
        """
        if not pages:
            return None
        key, first = self._held.get(pages[-1], (b"", 0))
        if key != keys[-1]:
            return None
        held = (self._held.get(page) == (key, first) for page, key in zip(pages[first:], keys[first:], strict=True))
        return first if all(held) else None


@dataclass(slots=True)
class HeadGrowth(Growth):
    """A growth whose own nodes are those of the tree."""

    hidden: list[Tensor] = field(default_factory=list)  # float32 [hidden] by node: the root's x, else the parent's z


MAX_PENDING_ROWS = 64  # features kept until a proposal; from this number on they are computed, to bound memory


@dataclass(slots=True)
class _Feed:
    """Committed slots of a sequence to compute."""

    sequence: Sequence
    context: HeadContext
    rows: int  # pending ones; 0: the root again
    growth: HeadGrowth | None  # what grows from the root's logits


class HeadDrafter(ModelBasedDrafter):
    """Proposes the top-w of log q / T + G, as `draft.model.ModelDrafter` does; q is the head's distribution.

    The head's KV is in its own pool under the shared page table. Slot i holds token i's features and the
    embedding of token i + 1, so a sequence of n tokens fills slots 0 to n - 2, and the root of its tree is slot n - 2.
    Each level computes the tree so far again, since a layer is cheap, so KV is never moved.

    The engine passes the target's features to `features`. They are kept until a proposal needs them or
    `MAX_PENDING_ROWS` are pending, so prompts cost the head's first half (features to KV) while they are prefilled.

    Prefix hits: the target computes nothing, so there are no features. But a slot's KV depends only on its own
    features, the next token and its position, so the KV that another sequence left in a shared page is valid;
    `HeadPages` records it. (The last slot of a page holds the other sequence's next token, which may differ: then one
    key of the context is slightly wrong.) If a page was never filled, because its sequence ran without the head, the
    context begins at the first computed page, and positions count from there: rotary attention depends on distances
    only. Wrong KV costs speed, never output.
    """

    name = "head"

    def __init__(self, network: HeadNetwork, sampler: Sampler, columns: Tensor | None = None) -> None:
        """columns: those of the target's auxiliary states that are the head's features, int64; None: all, in order."""
        self._network, self._sampler, self._columns = network, sampler, columns
        self._contexts: dict[Sequence, HeadContext] = {}
        self._pages = HeadPages()
        self._pending_rows = min(MAX_PENDING_ROWS, network.max_rows)

    def begin(self, sequence: Sequence) -> None:
        self._contexts.setdefault(sequence, HeadContext())  # a swap of the draft model begins a running one again

    def features(self, sequence: Sequence, start: int, rows: Tensor) -> None:
        """See `Drafter`. Skipped positions were in the prefix cache; repeated positions are ignored."""
        context = self._contexts[sequence]
        if start > context.known:
            self._restart(context, sequence, start)
        rows = rows[max(0, context.known - start) :]
        if rows.shape[0]:
            context.append(rows if self._columns is None else rows[:, self._columns])
        while (ready := self._ready_rows(sequence, context)) >= self._pending_rows:
            self._feed([_Feed(sequence, context, min(ready, self._network.max_rows), None)])

    def rewind(self, sequence: Sequence) -> None:
        self._contexts[sequence] = HeadContext()

    def end(self, sequence: Sequence) -> None:
        """Drop the sequence's context; `HeadPages` keeps its pages."""
        self._contexts.pop(sequence, None)

    def pending_prefill(self, sequence: Sequence) -> int:
        """See `ModelBasedDrafter`; at most `MAX_PENDING_ROWS`."""
        return self._contexts[sequence].n_pending

    def warm_up(self, rows: int) -> None:
        rows = min(rows, self._network.max_logit_rows)
        hidden = self._network.fuse(torch.zeros(rows, self._network.head.fc.k))
        entry = BatchEntry([0] * rows, list(range(-1, rows - 1)), 0, list(range(-(-rows // PAGE_SIZE))))
        self._network.forward(ForwardBatch.build([entry]), hidden, list(range(rows)))

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        growths = [_begin(task) for task in tasks]
        feeds = []
        for task, growth in zip(tasks, growths, strict=True):
            context = self._contexts[task.sequence]
            if task.max_nodes > 0 and task.max_depth > 0:
                feeds += self._catch_up(task.sequence, context, growth)
            elif (rows := min(task.prefill, self._ready_rows(task.sequence, context), self._network.max_rows)) > 0:
                feeds.append(_Feed(task.sequence, context, rows, None))
        for span in _spans([max(1, feed.rows) for feed in feeds], [1] * len(feeds), self._network):
            self._feed(feeds[span])
        growing = worth_expanding([feed.growth for feed in feeds if feed.growth is not None])
        while growing:
            self._grow(growing)
            growing = worth_expanding(growing)
        return [growth.tree for growth in growths]

    def _restart(self, context: HeadContext, sequence: Sequence, start: int) -> None:
        pages, rest = divmod(start, PAGE_SIZE)
        extend_keys(sequence.page_keys, sequence.tokens, sequence.salt, pages)
        first = self._pages.first_page(sequence.pages[:pages], sequence.page_keys[:pages]) if not rest else None
        begin = -(-start // PAGE_SIZE)
        context.restart(begin, begin * PAGE_SIZE) if first is None else context.restart(first, start)

    @staticmethod
    def _ready_rows(sequence: Sequence, context: HeadContext) -> int:
        """Number of pending slots whose next token is committed."""
        return min(context.n_pending, len(sequence.tokens) - 1 - context.filled)

    def _catch_up(self, sequence: Sequence, context: HeadContext, growth: HeadGrowth) -> list[_Feed]:
        """The slots to compute for the root's logits; none if its features are missing."""
        root = len(sequence.tokens) - 2
        rows = min(self._ready_rows(sequence, context), self._network.max_rows)
        if context.filled + rows != root + 1 or (rows <= 0 and context.root is None):
            growth.task.begun = False
            return []
        return [_Feed(sequence, context, rows, growth)]

    def _feed(self, feeds: Seq[_Feed]) -> None:
        """Compute committed slots in one forward, and the first level of the trees whose root is among them."""
        pending = [feed.context.take(feed.rows) for feed in feeds if feed.rows]
        fused = self._network.fuse(torch.cat(pending)) if pending else torch.empty(0)
        entries, hidden, chosen, at, row = [], [], [], 0, 0
        for feed in feeds:
            context, tokens, n = feed.context, feed.sequence.tokens, feed.rows
            low = context.filled if n else context.filled - 1
            if n:
                hidden.append(fused[at : at + n])
                self._pages.written(feed.sequence.pages, low, low + n)
            else:
                assert context.root is not None  # `_catch_up` saw to it
                hidden.append(context.root[None])
            at, n = at + n, max(n, 1)
            entries.append(_entry(feed.sequence, context, tokens[low + 1 : low + 1 + n], range(-1, n - 1), low))
            row += n
            if feed.growth is not None:
                chosen.append(row - 1)
        logits, z = self._network.forward(ForwardBatch.build(entries), torch.cat(hidden), chosen)
        begun = []
        for feed, xs in zip(feeds, hidden, strict=True):  # after the forward, which may fail
            feed.context.root = xs[-1].clone()
            self._advance(feed)
            if feed.growth is not None:
                feed.growth.hidden = [feed.context.root]
                begun.append(feed.growth)
        self._expand(begun, logits, z)

    def _advance(self, feed: _Feed) -> None:
        """Count the slots that were written, and record the pages that they completed."""
        context, sequence = feed.context, feed.sequence
        done = context.filled // PAGE_SIZE
        context.filled += feed.rows
        full = context.filled // PAGE_SIZE
        extend_keys(sequence.page_keys, sequence.tokens, sequence.salt, full)
        for depth in range(max(done, context.first_page), full):
            self._pages.filled(sequence.pages[depth], sequence.page_keys[depth], context.first_page)

    def _grow(self, growing: Seq[HeadGrowth]) -> None:
        """Grow every tree by a level. It has at most `MAX_NODES` nodes, and a forward no fewer rows."""
        sizes, frontiers = [len(each.tree) for each in growing], [len(each.frontier) for each in growing]
        for span in _spans(sizes, frontiers, self._network):
            self._grow_group(growing[span])

    def _grow_group(self, group: Seq[HeadGrowth]) -> None:
        entries, chosen, row = [], [], 0
        for growth in group:
            sequence, tree, low = growth.task.sequence, growth.tree, growth.base
            self._pages.written(sequence.pages, low + 1, low + len(tree))
            entries.append(_entry(sequence, self._contexts[sequence], tree.tokens, tree.parents, low))
            chosen += [row + node for node in growth.frontier]
            row += len(tree)
        hidden = torch.stack([x for growth in group for x in growth.hidden])
        self._expand(group, *self._network.forward(ForwardBatch.build(entries), hidden, chosen))

    def _expand(self, growing: Seq[HeadGrowth], logits: Tensor, z: Tensor) -> None:
        """Add the children of all frontier nodes, of which each growth chooses its next frontier."""
        if not growing:
            return
        rows = [g.row(g.tree.path_tokens(node)) for g in growing for node in g.frontier]
        children = self._sampler.children(logits, rows, max(growth.task.width for growth in growing))
        kept, at = z.clone(), 0  # z is a view of the network's buffer
        for growth in growing:
            span = slice(at, at + len(growth.frontier))
            behind = dict(zip(growth.frontier, kept[span], strict=True))
            fresh = add_children(growth, children[span])
            growth.hidden += [behind[growth.parents[node]] for node in fresh]
            growth.advance(fresh)
            at = span.stop


def _begin(task: DraftTask) -> HeadGrowth:
    """A growth of the root alone. The root is in the slot of the token before it."""
    tokens = task.sequence.tokens
    return HeadGrowth(task, TokenTree(tokens[-1]), len(tokens) - 2, task.sequence.pages, [tokens[-1]])


def _entry(sequence: Sequence, context: HeadContext, tokens: Seq[int], parents: Seq[int], low: int) -> BatchEntry:
    """Rows from slot ``low`` on, with positions relative to the context's first page."""
    skipped = context.first_page
    return BatchEntry(tokens, list(parents), low - skipped * PAGE_SIZE, sequence.pages[skipped:])


def _spans(rows: Seq[int], chosen: Seq[int], limits: BatchLimits) -> Iterator[slice]:
    """Split a list of items into runs that fit one forward, by the rows and the chosen rows of each item."""
    start, row, choice = 0, 0, 0
    for index, (r, c) in enumerate(zip(rows, chosen, strict=True)):
        if index > start and (row + r > limits.max_rows or choice + c > limits.max_logit_rows):
            yield slice(start, index)
            start, row, choice = index, 0, 0
        row, choice = row + r, choice + c
    if start < len(rows):
        yield slice(start, len(rows))
