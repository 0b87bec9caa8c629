"""Drafts with an EAGLE-3 feature head: one layer over the target's own hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from draft.head_context import HeadContext
from draft.head_network import HeadNetwork
from draft.head_pages import HeadPages
from draft.head_tree import HeadTree
from draft.protocol import DraftTask
from specdec.kv_cache.page_key import PAGE_SIZE
from specdec.sampling import Sampler
from specdec.sequence import Sequence
from specdec.tree import TokenTree
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

PENDING_ROWS = 64  # features that wait for a propose: more are computed at once, so that they take no memory


@dataclass(slots=True)
class _Feed:
    """Rows of committed slots to compute: ``rows`` pending ones, or (0) the root again. ``tree``: to grow after it."""

    sequence: Sequence
    context: HeadContext
    rows: int
    tree: HeadTree | None


class HeadDrafter:
    """Proposes the top-w of log q / T + G under the request's own filters, with the noise the target will use, as
    `draft.model.ModelDrafter` does; q is the head's distribution.

    The head's KV lies in its own one-layer pool under the shared page table: slot i holds token i's features beside
    the embedding of token i + 1, so a sequence of n tokens fills slots 0 to n - 2, and the root of its tree is slot
    n - 2. A level feeds the tree so far again (a layer is cheap), so nothing is ever moved.

    The engine hands over the target's features with `features`. They wait until a proposal needs them or 64 have
    gathered; prompts therefore cost the head's first half (features to KV) as they are prefilled.

    Prefix hits: the target computes nothing there, so no features come. But a slot's KV depends on nothing except its
    own features, the next token and its position, so what another sequence left in a shared page serves as it is:
    `HeadPages` remembers what is where. (The last slot of a page has the other sequence's next token in it, which may
    differ from ours: one key of a context is then slightly off.) Where a page was never filled, because its sequence
    ran without the head, the context begins at the first page that is computed, and positions are counted from there;
    rotary attention sees distances only. Either way a wrong guess costs speed, never output.
    """

    name = "head"
    costly = True

    def __init__(self, network: HeadNetwork, sampler: Sampler) -> None:
        self._network, self._sampler = network, sampler
        self._contexts: dict[int, HeadContext] = {}
        self._pages = HeadPages()
        self._pending_rows = min(PENDING_ROWS, network.max_rows)

    def begin(self, sequence: Sequence) -> None:
        """Start with an empty context."""
        self._contexts[id(sequence)] = HeadContext()

    def features(self, sequence: Sequence, start: int, rows: Tensor) -> None:
        """The target computed positions ``start`` on: committed tokens and the accepted path, in order.

        rows: float32 [n, taps * target hidden], copied here. Positions skipped since the last call were in the prefix
        cache; positions told before are ignored. Call it once the tokens are committed, before `observe`.
        """
        context = self._contexts.get(id(sequence))
        if context is None:
            return
        if start > context.known:
            self._restart(context, sequence, start)
        rows = rows[max(0, context.known - start) :]
        if rows.shape[0]:
            context.append(rows)
        while (ready := self._ready_rows(sequence, context)) >= self._pending_rows:
            self._feed([_Feed(sequence, context, min(ready, self._network.max_rows), None)])

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Nothing to do: `propose` reads the committed tokens."""

    def rewind(self, sequence: Sequence) -> None:
        """Forget: the target computes it again, or finds it in the prefix cache as any other sequence would."""
        if id(sequence) in self._contexts:
            self._contexts[id(sequence)] = HeadContext()

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence; what its pages hold stays known."""
        self._contexts.pop(id(sequence), None)

    def backlog(self, sequence: Sequence) -> int:
        """Features that wait; never many, since they are read as they gather."""
        context = self._contexts.get(id(sequence))
        return 0 if context is None else context.n_pending

    def rehearse(self, rows: int) -> None:
        """One level for ``rows`` sequences."""
        rows = min(rows, self._network.max_logit_rows)
        hidden = self._network.fuse(torch.zeros(rows, self._network.features_width))
        entry = BatchEntry([0] * rows, list(range(-1, rows - 1)), 0, list(range(-(-rows // PAGE_SIZE))))
        self._network.forward(ForwardBatch.build([entry]), hidden, list(range(rows)))

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Catch up with the committed tokens, then grow every tree by levels until its budget is used."""
        trees = [HeadTree(task) for task in tasks]
        feeds = []
        for tree in trees:
            task = tree.task
            context = self._contexts.get(id(task.sequence))
            if context is not None and task.max_nodes > 0 and task.max_depth > 0 and task.width > 0:
                feeds += self._catch_up(task.sequence, context, tree)
        growing: list[HeadTree] = []
        for span in self._spans([max(1, feed.rows) for feed in feeds], [1] * len(feeds)):
            growing += self._feed(feeds[span])
        while growing:
            growing = self._grow(growing)
        return [tree.tree for tree in trees]

    def _restart(self, context: HeadContext, sequence: Sequence, start: int) -> None:
        pages, rest = divmod(start, PAGE_SIZE)
        keys = context.keys_to(sequence, pages)
        first = self._pages.first_page(sequence.pages[:pages], keys) if not rest else None
        begin = -(-start // PAGE_SIZE)
        context.restart(begin, begin * PAGE_SIZE) if first is None else context.restart(first, start)

    @staticmethod
    def _ready_rows(sequence: Sequence, context: HeadContext) -> int:
        """Pending slots whose next token is known."""
        return min(context.n_pending, len(sequence.tokens) - 1 - context.filled)

    def _catch_up(self, sequence: Sequence, context: HeadContext, tree: HeadTree) -> list[_Feed]:
        """What to feed so that the root's logits come out; nothing where its features are not known."""
        root = len(sequence.tokens) - 2
        rows = min(self._ready_rows(sequence, context), self._network.max_rows)
        if context.filled + rows != root + 1 or (rows <= 0 and context.root is None):
            return []
        return [_Feed(sequence, context, rows, tree)]

    def _feed(self, feeds: Seq[_Feed]) -> list[HeadTree]:
        """One forward over committed slots; trees whose root it computed get their first level."""
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
            if feed.tree is not None:
                chosen.append(row - 1)
        logits, z = self._network.forward(ForwardBatch.build(entries), torch.cat(hidden), chosen)
        grown = []
        for feed, xs in zip(feeds, hidden, strict=True):  # only now is it true
            feed.context.root = xs[-1].clone()
            self._advance(feed)
            if feed.tree is not None:
                feed.tree.start(feed.context.root)
                grown.append(feed.tree)
        return self._expand(grown, logits, z)

    def _advance(self, feed: _Feed) -> None:
        """Count the KV written, and note the pages it completed."""
        context, sequence = feed.context, feed.sequence
        context.filled += feed.rows
        full = context.filled // PAGE_SIZE
        keys = context.keys_to(sequence, full)
        for depth in range(max(context.n_told, context.first_page), full):
            self._pages.filled(sequence.pages[depth], keys[depth], context.first_page)
        context.n_told = full

    def _grow(self, growing: Seq[HeadTree]) -> list[HeadTree]:
        """One level: feed every tree, expand its frontier."""
        rows, chosen = self._network.max_rows, self._network.max_logit_rows
        fits = [tree for tree in growing if len(tree.tree) <= rows and len(tree.frontier) <= chosen]
        following: list[HeadTree] = []
        for span in self._spans([len(tree.tree) for tree in fits], [len(tree.frontier) for tree in fits]):
            following += self._grow_group(fits[span])
        return following

    def _spans(self, rows: Seq[int], chosen: Seq[int]) -> Iterator[slice]:
        return _spans(rows, chosen, self._network.max_rows, self._network.max_logit_rows)

    def _grow_group(self, group: Seq[HeadTree]) -> list[HeadTree]:
        entries, chosen, row = [], [], 0
        for item in group:
            sequence, tree = item.task.sequence, item.tree
            context = self._contexts[id(sequence)]
            low = len(sequence.tokens) - 2
            self._pages.written(sequence.pages, low + 1, low + len(tree))
            entries.append(_entry(sequence, context, tree.tokens, tree.parents, low))
            chosen += [row + node for node in item.frontier]
            row += len(tree)
        hidden = torch.stack([x for item in group for x in item.hidden])
        return self._expand(group, *self._network.forward(ForwardBatch.build(entries), hidden, chosen))

    def _expand(self, trees: Seq[HeadTree], logits: Tensor, z: Tensor) -> list[HeadTree]:
        """Give frontier nodes their children; returns the trees that can go on."""
        if not trees:
            return []
        width = max(item.task.width for item in trees)
        children = self._sampler.children(logits, [row for item in trees for row in item.rows()], width)
        kept, following, at = z.clone(), [], 0  # z is a view of the network's buffer
        for item in trees:
            n = len(item.frontier)
            if item.add(children[at : at + n], kept[at : at + n]):
                following.append(item)
            at += n
        return following


def _entry(sequence: Sequence, context: HeadContext, tokens: Seq[int], parents: Seq[int], low: int) -> BatchEntry:
    """Rows from slot ``low`` on, seen from where the context begins."""
    skipped = context.first_page
    return BatchEntry(tokens, list(parents), low - skipped * PAGE_SIZE, sequence.pages[skipped:])


def _spans(rows: Seq[int], chosen: Seq[int], max_rows: int, max_chosen: int) -> Iterator[slice]:
    """Cuts a list of items into runs that fit one forward, by the rows and the chosen rows of each item."""
    start, row, choice = 0, 0, 0
    for index, (r, c) in enumerate(zip(rows, chosen, strict=True)):
        if index > start and (row + r > max_rows or choice + c > max_chosen):
            yield slice(start, index)
            start, row, choice = index, 0, 0
        row, choice = row + r, choice + c
    if start < len(rows):
        yield slice(start, len(rows))
