"""Growing level by level gives exactly the logits of feeding the whole tree in one forward, with the promised rows."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.growth import WIDEST_LEVEL, Growth, feed
from draft.protocol import DraftTask
from specdec.control.inputs import TreeExpansion
from specdec.core.sampling import SequenceSampling
from specdec.core.tree import TokenTree
from specdec.core.types import SamplingParams, StoppingParams
from specdec.models.decoder import Decoder
from tests.draft.helpers import make_sequence, make_task, sampled_by
from tests.draft.tiny_drafts import decoder
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

PAGES_EACH = 4
VOCAB = 380


class CountingDecoder:
    """A decoder that notes the rows of each forward."""

    def __init__(self, inner: Decoder, max_rows: int | None = None) -> None:
        self.inner, self.rows = inner, list[int]()
        self.max_rows = inner.max_rows if max_rows is None else max_rows
        self.max_logit_rows, self.config = inner.max_logit_rows, inner.config

    def forward(self, batch: ForwardBatch, logit_rows: Seq[int]) -> Any:
        assert batch.rows <= self.max_rows
        self.rows.append(batch.rows)
        return self.inner.forward(batch, logit_rows)


@functools.cache
def shared_decoder() -> Decoder:
    return decoder("target")


def start(tokens: list[int], pages: list[int], depth: int = 63) -> Growth:
    """A growth at the end of ``tokens``, which are fed."""
    feed_chain(tokens, pages)
    task = make_task(make_sequence(tokens), nodes=63, depth=depth)
    return Growth(task, TokenTree(tokens[-1]), len(tokens) - 1, pages, [tokens[-1]])


def feed_chain(tokens: list[int], pages: list[int]) -> None:
    made = shared_decoder()
    for at in range(0, len(tokens), made.max_rows):
        part = tokens[at : at + made.max_rows]
        made.forward(ForwardBatch.build([BatchEntry(part, list(range(-1, len(part) - 1)), at, pages)]), [])


def afresh(growth: Growth, tokens: list[int], pages: list[int]) -> Any:
    """Logits of every own node, from one forward of the whole tree behind a prompt fed to other pages."""
    feed_chain(tokens[:-1], pages)
    entry = BatchEntry(growth.tokens, growth.parents, len(tokens) - 1, pages)
    return shared_decoder().forward(ForwardBatch.build([entry]), list(range(len(growth.tokens)))).numpy().copy()


def pages_of(index: int) -> list[int]:
    return list(range(index * PAGES_EACH, (index + 1) * PAGES_EACH))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 3))
def test_any_levels_equal_the_whole_tree(seed: int, count: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 63, 64, 65, 130)))] for _ in range(count)]
    growths = [start(prompt, pages_of(i)) for i, prompt in enumerate(prompts)]
    seen: list[dict[int, Any]] = [{} for _ in growths]
    for _ in range(rng.randint(1, 6)):
        for growth in growths:
            fresh = [
                growth.add(parent, rng.randrange(VOCAB), 0)
                for parent in growth.frontier
                for _ in range(rng.randint(0, 3))
            ]
            # Any node that was not computed as part of the chain may be requested, of any earlier level.
            open_nodes = [n for n in range(1, len(growth.tokens)) if n not in growth.chain]
            pool = fresh if rng.random() < 0.8 else open_nodes
            growth.frontier = rng.sample(pool, min(len(pool), rng.randint(1, WIDEST_LEVEL)))
        growing = [growth for growth in growths if growth.frontier]
        fed, logits = feed(shared_decoder(), growing)
        assert fed == growing
        if logits is None:
            assert not growing
            break
        at = 0
        values = logits.numpy().copy()
        for growth in fed:
            for node in growth.frontier:
                seen[growths.index(growth)][node] = values[at]
                at += 1
    for i, (growth, prompt) in enumerate(zip(growths, prompts, strict=True)):
        whole = afresh(growth, prompt, pages_of(5 + i))
        for node, row in seen[i].items():
            assert np.array_equal(row, whole[node]), f"node {node} of growth {i}"


def test_a_chain_costs_one_row_per_level() -> None:
    counting = CountingDecoder(shared_decoder())
    growth = start([5, 6, 7], pages_of(0))
    for token in range(10, 18):
        growth.frontier = [growth.add(growth.frontier[0], token, 0)]
        feed(counting, [growth])  # type: ignore[arg-type]
    assert counting.rows == [1] * 8


def test_the_best_path_of_a_wide_level_becomes_the_chain() -> None:
    counting = CountingDecoder(shared_decoder())
    growth = start([5, 6, 7], pages_of(0))
    growth.frontier = [growth.add(0, 10, 0), growth.add(0, 11, 0)]
    feed(counting, [growth])  # type: ignore[arg-type]
    growth.frontier = [growth.add(growth.frontier[0], 12, 0)]
    feed(counting, [growth])  # type: ignore[arg-type]
    # Two children hang off the root, which is computed once more; the first one's child needs nothing but itself.
    assert counting.rows == [3, 1]


def test_nodes_over_the_forward_limit_are_dropped() -> None:
    growths = [start([5 + i, 6, 7], pages_of(i)) for i in range(3)]
    for growth in growths:
        growth.frontier = [growth.add(0, 10 + i, 0) for i in range(3)]
    counting = CountingDecoder(shared_decoder(), max_rows=9)
    fed, logits = feed(counting, growths)  # type: ignore[arg-type]
    assert fed == growths[:2]
    assert growths[2].frontier == []
    assert logits is not None
    values = logits.numpy().copy()
    assert values.shape[0] == 6
    assert counting.rows == [8]
    for i, growth in enumerate(fed):
        whole = afresh(growth, [5 + i, 6, 7], pages_of(5))
        assert np.array_equal(values[3 * i : 3 * i + 3], whole[1:])


def test_nodes_without_pages_are_dropped() -> None:
    """Several own nodes may stand for one of the tree, so they can be more than the slots provided."""
    growth = start(list(range(62)), pages_of(0)[:1])
    growth.frontier = [growth.add(0, 10 + i, 0) for i in range(3)]
    assert feed(shared_decoder(), [growth]) == ([], None)
    assert growth.frontier == []


def test_no_nodes_to_expand() -> None:
    assert feed(shared_decoder(), []) == ([], None)


def grown(scores: Seq[float], **limits: Any) -> tuple[Growth, list[int]]:
    """A growth whose root has a child per score."""
    task = make_task(make_sequence([1, 2]), width=16, **limits)
    growth = Growth(task, TokenTree(2), 1, [0], [2])
    nodes = [growth.add(0, i, task.add(growth.tree, 0, i, math.exp(score))) for i, score in enumerate(scores)]
    return growth, nodes


def test_the_best_nodes_are_expanded() -> None:
    growth, nodes = grown([-3, -1, -2, -5, -4, -6], nodes=20)
    growth.advance(nodes)
    assert growth.frontier == [nodes[i] for i in (1, 2, 0, 4)]


def test_a_full_tree_is_not_expanded() -> None:
    growth, nodes = grown([-1, -2, -3], nodes=3)
    growth.advance(nodes)
    assert growth.frontier == []


def test_the_deepest_level_is_not_expanded() -> None:
    growth, nodes = grown([-1, -2, -3], nodes=9, depth=1)
    growth.advance(nodes)
    assert growth.frontier == []


@pytest.mark.parametrize(("floor", "going"), [(-math.inf, 3), (-2.5, 2), (-0.5, 0)])
def test_unlikely_nodes_are_not_expanded(floor: float, going: int) -> None:
    growth, nodes = grown([-1, -2, -3], nodes=9)
    task = growth.task
    growth.task = DraftTask(task.sequence, 9, 7, 16, expansion=TreeExpansion(None, 0.0, [0.0], 1.0, floor))
    growth.advance(nodes)
    assert len(growth.frontier) == going


def permits(token: int, path: Seq[int] = (), n_output: int = 0, **fields: Any) -> bool:
    sequence = make_sequence([1, 2])
    sequence.tokens += [3] * n_output
    stopping = StoppingParams(min_tokens=fields.pop("min_tokens", 0), stop_token_ids=(9,))
    sampling = SequenceSampling(SamplingParams(temperature=0.0, **fields), stopping, 1, 100, (), (1, 2))
    growth = Growth(DraftTask(sampled_by(sequence, sampling), 7, 7, 2), TokenTree(sequence.tokens[-1]), 1, [0], [2])
    return growth.permits(path, token)


def test_allowed_ids_are_obeyed() -> None:
    assert permits(40, allowed_token_ids=(31, 40))
    assert not permits(41, allowed_token_ids=(31, 40))
    assert not permits(10**6, allowed_token_ids=(31, 40))
    assert permits(41)
    assert permits(41, frequency_penalty=1.0)


def test_a_short_text_gets_no_stop_token() -> None:
    assert not permits(9, min_tokens=3)
    assert not permits(9, [5], n_output=1, min_tokens=3)
    assert permits(9, [5, 5], n_output=1, min_tokens=3)
    assert permits(8, min_tokens=3)
