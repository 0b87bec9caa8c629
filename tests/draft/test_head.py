"""The head drafter: its context must stay right, which only its proposals can show.

A wrong context never changes the output, so path identity does not detect it. Here every chain is compared with the one
that plain torch computes from the published equations over fresh features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.head import HeadPages, _spans
from draft.protocol import DraftTask
from specdec.control.estimates.costs import CostTable
from specdec.control.inputs import TreeExpansion
from specdec.core.sampling import Sampler, SequenceSampling
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import SamplingParams, StoppingParams
from tests.draft.eagle3_loop import Loop
from tests.draft.helpers import sampled_by
from tests.models.tiny import VOCAB_SIZE
from verify_kernels.reference.sampling import ReferenceSampling
from verify_kernels.sampling import RowSampling, SamplingPolicy

PROMPT = [(7 * i * i + 3 * i + 11) % VOCAB_SIZE for i in range(150)]
DEPTH = 5


@pytest.fixture(scope="module")
def make_loop(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loop]:
    folder = tmp_path_factory.mktemp("head")
    return lambda **options: Loop(folder, **options)


def check_chain(loop: Loop, sequence: Sequence, tree: TokenTree, begin: int = 0) -> None:
    """Tokens and log-probabilities: one wrong slot of the context seldom changes the former."""
    assert tree.parents == list(range(-1, DEPTH))
    expected = loop.expected_chain(sequence, DEPTH, begin)
    assert tree.tokens[1:] == [token for token, _ in expected]
    steps = [tree.scores[node] - tree.scores[node - 1] for node in range(1, len(tree))]
    assert steps == pytest.approx([logprob for _, logprob in expected], abs=1e-3)


def check(loop: Loop, sequence: Sequence, begin: int = 0) -> TokenTree:
    """Propose, and compare with the reference."""
    (tree,) = loop.drafter.propose([loop.task(sequence, DEPTH, DEPTH)])
    check_chain(loop, sequence, tree, begin)
    return tree


def run(loop: Loop, sequence: Sequence, steps: int, begin: int = 0) -> None:
    for i in range(steps):
        loop.step(sequence, check(loop, sequence, begin), gift=i % 4)


@pytest.mark.parametrize("chunk", [1, 20, 96])
def test_chains_equal_the_reference(make_loop: Callable[..., Loop], chunk: int) -> None:
    loop = make_loop()
    sequence = loop.admit(PROMPT[:70])
    loop.prefill(sequence, chunk)
    run(loop, sequence, 5)
    loop.end(sequence)
    assert not loop.drafter._contexts


def test_steps_without_a_proposal_leave_no_gap(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    sequence = loop.admit(PROMPT[:30])
    loop.prefill(sequence, 20)
    for _ in range(20):
        loop.step(sequence, None)
    assert loop.drafter._contexts[sequence].n_pending < 64
    check(loop, sequence)
    check(loop, sequence)  # proposed twice without a commit in between


def test_a_prefix_hit_keeps_the_context(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    first = loop.admit(PROMPT)
    loop.prefill(first, 64)
    loop.end(first)
    second = loop.admit([*PROMPT[:140], 9, 9, 8])
    assert second.n_computed == 128
    loop.prefill(second, 64)
    run(loop, second, 3)
    third = loop.admit(PROMPT)  # in the same batch as the second, on the same pages
    loop.prefill(third, 64)
    run(loop, third, 2)
    run(loop, second, 2)


def test_a_full_hit_proposes_one_step_later(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    first = loop.admit(PROMPT)
    loop.prefill(first, 64)
    second = loop.admit(PROMPT[:129])
    assert second.n_computed == 128
    assert not second.prefilling
    task = loop.task(second)
    (tree,) = loop.drafter.propose([task])
    assert (len(tree), task.begun) == (1, False)  # no forward, so its time is no level's
    loop.step(second, tree)
    run(loop, second, 3)


def test_pages_without_head_kv_shorten_the_context(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    quiet = loop.admit(PROMPT, begin=False)
    loop.prefill(quiet, 64)
    loop.end(quiet)
    second = loop.admit(PROMPT)
    assert second.n_computed == 128
    loop.prefill(second, 64)
    run(loop, second, 19, begin=128)
    assert second.n_computed > 192
    loop.end(second)
    third = loop.admit(second.tokens)  # its third page holds KV of the shortened context
    assert third.n_computed == 192
    loop.prefill(third, 64)
    run(loop, third, 2, begin=128)


def test_reused_pages_are_recognised(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(pages=4)
    first = loop.admit(PROMPT)
    loop.prefill(first, 64)
    loop.end(first)
    other = loop.admit([t ^ 1 for t in PROMPT])  # takes the first one's pages over, with the head's
    loop.prefill(other, 64)
    loop.end(other)
    quiet = loop.admit(PROMPT, begin=False)
    loop.prefill(quiet, 64)
    loop.end(quiet)
    last = loop.admit(PROMPT)
    assert last.n_computed == 128
    loop.prefill(last, 64)
    run(loop, last, 2, begin=128)


def test_preemption_is_recovered_from(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    sequence = loop.admit(PROMPT[:100])
    loop.prefill(sequence, 64)
    run(loop, sequence, 2)
    loop.preempt(sequence)
    assert sequence.n_computed == 64
    loop.prefill(sequence, 10)
    run(loop, sequence, 3)
    loop.kv.release(sequence)
    loop.kv.flush()
    sequence.n_computed = 0
    loop.drafter.rewind(sequence)
    assert loop.kv.admit(sequence) is not None
    assert sequence.n_computed == 0
    loop.prefill(sequence, 64)
    run(loop, sequence, 2)


@pytest.mark.parametrize("max_rows", [7, 16, 48])
def test_a_batch_is_drafted_like_each_sequence_alone(make_loop: Callable[..., Loop], max_rows: int) -> None:
    loop = make_loop(pages=20, max_rows=max_rows)
    sequences = [loop.admit(PROMPT[i : i + 30 + 9 * i]) for i in range(4)]
    for sequence in sequences:
        loop.prefill(sequence, 13)
    for _ in range(2):
        trees = loop.drafter.propose([loop.task(sequence, DEPTH, DEPTH) for sequence in sequences])
        for sequence, tree in zip(sequences, trees, strict=True):
            check_chain(loop, sequence, tree)
            loop.step(sequence, tree)


def test_trees_follow_the_reference(make_loop: Callable[..., Loop]) -> None:
    """Children of every node are the best of the reference at that node."""
    loop, width = make_loop(), 3
    sequence = loop.admit(PROMPT[:40])
    loop.prefill(sequence, 64)
    (tree,) = loop.drafter.propose([loop.task(sequence, 12, 3, width)])
    assert len(tree) == 13
    assert max(tree.depths) == 3
    assert max(tree.depths.count(d) for d in range(4)) > width  # several parents had children
    assert {source for sources in tree.sources[1:] for source in sources} == {"head"}
    reference = loop.reference()
    _, features = loop.plain(sequence.tokens)
    slots = reference.committed(sequence.tokens, features)
    ids = torch.arange(loop.tensors["d2t"].shape[0]) + loop.tensors["d2t"]
    for node, slot in enumerate(reference.tree(slots, tree.tokens, tree.parents)):
        best = ids[slot.logits.topk(width).indices].tolist()
        children = [tree.tokens[n] for n in range(len(tree)) if tree.parents[n] == node]
        assert set(children) <= set(best)
        logprobs = slot.logits.log_softmax(0)
        for child in (n for n in range(len(tree)) if tree.parents[n] == node):
            draft_id = int((ids == tree.tokens[child]).nonzero())
            assert tree.scores[child] - tree.scores[node] == pytest.approx(float(logprobs[draft_id]), abs=1e-3)


def test_filters_and_noise_of_the_request_apply(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    sequence = loop.admit(PROMPT[:40])
    loop.prefill(sequence, 64)
    ids = sorted((torch.arange(150) + loop.tensors["d2t"]).tolist())
    allowed = (ids[3], ids[50], ids[140])

    def tokens(seed: int, temperature: float, allow: tuple[int, ...]) -> list[int]:
        params = SamplingParams(temperature=temperature, allowed_token_ids=allow)
        sampling = SequenceSampling(params, StoppingParams(), seed, VOCAB_SIZE, (), [])
        return loop.drafter.propose([DraftTask(sampled_by(sequence, sampling), 4, 4, 1, "head")])[0].tokens[1:]

    assert set(tokens(1, 1.0, allowed)) <= set(allowed)
    outside = next(t for t in range(VOCAB_SIZE) if t not in ids)
    assert tokens(1, 1.0, (outside,)) == []  # no token known to the head is allowed
    assert tokens(1, 9.0, ()) != tokens(2, 9.0, ())
    reference = loop.reference()
    slots = reference.committed(sequence.tokens, loop.plain(sequence.tokens)[1])
    sampler = Sampler(ReferenceSampling())
    for depth, token in enumerate(tokens(1, 9.0, ())):  # the noise of the very position the token will occupy
        logits = torch.full((1, VOCAB_SIZE), -1e31).index_copy_(1, torch.tensor(ids), slots[-1].logits[None])
        policy = SamplingPolicy(seed=1, temperature=9.0)
        assert sampler.sample(logits, [RowSampling(policy, len(sequence.tokens) + depth)]) == [(token, None)]
        slots.append(reference.slot(slots[-1].z, token, len(slots), slots))


def test_a_page_used_for_drafting_is_no_longer_known(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    sequence = loop.admit(PROMPT[:63])
    loop.prefill(sequence, 96)
    task, book = loop.task(sequence, DEPTH, DEPTH), loop.drafter._pages
    for page in sequence.pages:
        book.filled(page, b"old", 0)
    check_chain(loop, sequence, loop.drafter.propose([task])[0])  # slots 62 to 66
    assert book.first_page(sequence.pages[:1], [b"old"]) is None
    book.filled(sequence.pages[0], b"old", 0)
    assert book.first_page(sequence.pages[:2], [b"old", b"old"]) is None


def test_rejected_nodes_are_not_expanded(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    sequence = loop.admit(PROMPT[:40])
    loop.prefill(sequence, 64)
    sequence = loop.task(sequence).sequence
    floor = -2.5
    task = DraftTask(sequence, 12, 12, 2, "head", lambda rank, depth, prob: (-1.0 - 9 * rank, 7), floor)
    (tree,) = loop.drafter.propose([task])
    assert tree.depths == [0, 1, 2]
    assert tree.cells[1:] == [7, 7]
    silent = DraftTask(sequence, 12, 12, 2, "head", lambda rank, depth, prob: (-9.0, 7), floor)
    assert len(loop.drafter.propose([silent])[0]) == 1
    check(loop, sequence)


def test_levels_that_do_not_pay_are_not_grown(make_loop: Callable[..., Loop]) -> None:
    """The trees that grow share a level's price: two can pay it where one alone cannot."""
    loop = make_loop()
    sequences = [loop.admit(PROMPT[i : i + 40]) for i in range(2)]
    for sequence in sequences:
        loop.prefill(sequence, 64)
    expansion = TreeExpansion(CostTable([1, 2], [0], [[1.0, 1.0]]), 1.0, [0.0] * 40, 1.0)

    def depths(drafted: list[Sequence]) -> list[int]:
        tasks = [loop.task(sequence, DEPTH, DEPTH) for sequence in drafted]
        for task in tasks:
            task.odds, task.expansion = lambda rank, depth, prob: (math.log(0.9), -1), expansion
        return [max(tree.depths) for tree in loop.drafter.propose(tasks)]

    assert depths(sequences) == [DEPTH, DEPTH]
    assert depths(sequences[:1]) == [1]


def test_without_features_nothing_is_proposed(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    single, unfed = loop.admit(PROMPT[:1]), loop.admit(PROMPT[50:90])
    tasks = [loop.task(s) for s in (single, unfed)]
    assert [len(tree) for tree in loop.drafter.propose(tasks)] == [1, 1]
    loop.prefill(unfed, 64)
    none = [loop.task(unfed, nodes=0), loop.task(unfed, depth=0)]
    assert [len(tree) for tree in loop.drafter.propose(none)] == [1, 1]
    loop.step(single, None)
    check(loop, single)


def test_features_are_computed_in_pieces(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    sequence = loop.admit(PROMPT[:40])
    loop.prefill(sequence, 64)
    for left in (24, 9, 0, 0):
        assert len(loop.drafter.propose([DraftTask(sequence, 0, 0, 1, "head", prefill=15)])[0]) == 1
        assert loop.drafter.pending_prefill(sequence) == left
    check(loop, sequence)


def test_repeated_features_count_once(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    sequence = loop.admit(PROMPT[:40])
    loop.prefill(sequence, 39)
    loop.drafter.features(sequence, 30, loop.decoder.aux_hidden_states[30:39])
    assert loop.drafter._contexts[sequence].known == 39
    check(loop, sequence)


def test_after_a_gap_within_a_page_drafting_waits_for_the_next(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    sequence = loop.admit(PROMPT[:90])
    loop.prefill(sequence, 96)
    rows = loop.decoder.aux_hidden_states[:89].clone()
    loop.drafter.rewind(sequence)
    loop.drafter.features(sequence, 10, rows[10:50])  # the first ten were lost: slot 64 is the next whole page
    assert len(loop.drafter.propose([loop.task(sequence)])[0]) == 1
    loop.drafter.features(sequence, 50, rows[50:])
    check(loop, sequence, begin=64)


def test_pages_are_identified_by_content_and_position() -> None:
    book = HeadPages()
    keys = [b"a", b"b", b"c"]
    for page, key in zip((4, 5, 6), keys, strict=True):
        book.filled(page, key, 0)
    assert book.first_page([4, 5, 6], keys) == 0
    assert book.first_page([4, 5, 7], keys) is None
    assert book.first_page([4, 5, 6], [b"a", b"b", b"x"]) is None
    assert book.first_page([9, 5, 6], keys) is None
    assert book.first_page([], []) is None
    book.filled(6, b"c", 1)  # its context starts a page later than those before it
    assert book.first_page([4, 5, 6], keys) is None
    book.filled(5, b"b", 1)
    assert book.first_page([4, 5, 6], keys) == 1
    book.filled(6, b"c", 9)
    assert book.first_page([6], [b"x"]) is None
    book.filled(6, b"c", 0)
    book.filled(5, b"b", 0)
    book.written([4, 5, 6], 100, 129)
    assert book.first_page([4], keys[:1]) == 0
    assert book.first_page([4, 5], keys[:2]) is None
    book.filled(5, b"b", 0)
    assert book.first_page([4, 5, 6], keys) is None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=20))
@settings(max_examples=50)
def test_spans_are_complete_and_fit(sizes: list[tuple[int, int]]) -> None:
    rows, chosen = [r for r, _ in sizes], [c for _, c in sizes]
    limits = SimpleNamespace(max_rows=9, max_logit_rows=9)
    spans = list(_spans(rows, chosen, limits))  # type: ignore[arg-type]
    assert [i for span in spans for i in range(len(sizes))[span]] == list(range(len(sizes)))
    assert all(sum(rows[span]) <= 9 and sum(chosen[span]) <= 9 for span in spans)
