"""The drafter with another vocabulary, with an unrelated draft, changes nothing but time.

Its KV and its accounting stay correct whatever happens to a sequence, and it proposes only tokens that the target may
generate.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.path_identity import PLAIN, BatchConditions, first_mismatches, run_conditions
from draft.cross_vocab import CrossVocabularyDrafter
from draft.protocol import DraftTask
from specdec.core.sampling import SequenceSampling
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree, check_tree
from specdec.core.types import Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from tests.core.kv_cache.invariants import check_pages
from tests.draft.helpers import make_sequence, sampled_by
from tests.draft.tiny_drafts import (
    VOCAB,
    books_are_closed,
    cross_drafter,
    cut,
    finished,
    fresh,
    model,
    own_drafter,
    parts,
    word_ids,
    words,
)
from tests.engine.test_path_identity import requests

TEMPERATURES = (0.0, 0.7, 1.5)


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Any:
    """A drafter that raises is caught and costs only speed, so it would go unseen."""
    yield
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def named(drawn: list[Request], mode: SpeculationMode) -> list[Request]:
    speculation = SpeculationParams(mode)
    return [dataclasses.replace(r, request_id=f"r{i}", speculation=speculation) for i, r in enumerate(drawn)]


all_conditions = st.builds(
    BatchConditions,
    name=st.just("drawn"),
    drafters=st.just(("model",)),
    max_nodes=st.integers(1, 20),
    max_depth=st.integers(1, 8),
    width=st.integers(1, 5),
    concurrency=st.integers(1, 8),
    prefill_chunk=st.sampled_from([6, 33, 64]),
    kv_pages=st.sampled_from([None, 9, 12]),
    preempt_every=st.sampled_from([0, 0, 5, 11]),
    warm=st.booleans(),
)


@pytest.mark.parametrize("mode", [SpeculationMode.ON, SpeculationMode.AUTO])
@settings(max_examples=10)
@given(drawn=st.lists(requests, min_size=1, max_size=6), conditions=all_conditions)
def test_it_changes_no_token(mode: SpeculationMode, drawn: list[Request], conditions: BatchConditions) -> None:
    made = parts("other")
    plain = run_conditions(made, PLAIN, named(drawn, SpeculationMode.AUTO))
    other = run_conditions(made, conditions, named(drawn, mode))
    mismatches = first_mismatches(conditions.name, plain, other)
    assert not mismatches, mismatches[0]
    books_are_closed(own_drafter(made))


def task_for(sequence: Sequence, nodes: int = 10, depth: int = 5, width: int = 3, **fields: Any) -> DraftTask:
    params = SamplingParams(**{"temperature": 0.0} | fields)
    sampling = SequenceSampling(params, StoppingParams(), 5, VOCAB, (), sequence.tokens)
    return DraftTask(sampled_by(sequence, sampling), nodes, depth, width, "model")


def same(one: TokenTree, other: TokenTree) -> bool:
    return (one.tokens, one.parents, one.scores, one.cells) == (other.tokens, other.parents, other.scores, other.cells)


def torn_text(rng: random.Random) -> list[int]:
    """Words of the draft's vocabulary in the target's tokens, torn anywhere, with some tokens that are no text."""
    tokenizer, ids = model("target").tokenizer, list[int]()
    while len(ids) < 400:
        ids += cut(tokenizer, rng.choice(("reader", "jumped", " the", " event", "    return", "class", " 世")), rng)
        if rng.random() < 0.05:
            ids.append(rng.randrange(VOCAB))
    return ids


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_kept_kv_equals_recomputed_kv(seed: int) -> None:
    """The end of the text is retokenized repeatedly, after KV was computed for the previous tokens."""
    rng = random.Random(seed)
    keeps, forgets = cross_drafter(), cross_drafter()
    texts = [torn_text(rng) for _ in range(2)]
    sequences = [make_sequence(texts[i % 2][: rng.choice((1, 2, 5, 120, 200))]) for i in range(3)]
    for _ in range(8):
        drafted = [sequence for sequence in sequences if rng.random() < 0.8]
        tasks = [task_for(sequence, temperature=rng.choice(TEMPERATURES)) for sequence in drafted]
        for sequence in drafted:
            forgets.pending_prefill(sequence)
            forgets._readers[sequence].computed = 0
        assert all(map(same, keeps.propose(tasks), forgets.propose(tasks)))
        for reader in keeps._readers.values():
            stored = [] if reader.paged is None else reader.paged.tokens
            assert stored == reader.text.ids[: len(stored)], "pages are filed under tokens that are not theirs"
        for i, sequence in enumerate(sequences):
            text, at = texts[i % 2], len(sequence.tokens)
            sequence.tokens += text[at : at + rng.choice((1, 1, 1, 2, 5, 70))]
            if len(sequence.tokens) > 300 or rng.random() < 0.1:
                keeps.end(sequence)
                forgets.end(sequence)
                sequences[i] = make_sequence(text[: rng.randint(1, 200)])
    for drafter in (keeps, forgets):
        check_pages(drafter._kv, [reader.paged for reader in drafter._readers.values() if reader.paged is not None])
        for sequence in sequences:
            drafter.end(sequence)
        books_are_closed(drafter)


def prefill(drafter: CrossVocabularyDrafter, prompt: Seq[int], salt: str) -> int:
    """Tokens that must be read of a new sequence with this prompt, which is then drafted for and ended."""
    sequence = make_sequence(prompt, cache_salt=salt)
    pending = drafter.pending_prefill(sequence)
    drafter.propose([task_for(sequence)])
    drafter.end(sequence)
    return pending


def test_a_prefix_is_found_by_its_own_salt_only() -> None:
    drafter, prompt = cross_drafter("permuted"), words(200, 8)
    first = prefill(drafter, prompt, "a")
    assert prefill(drafter, prompt, "b") == first
    assert prefill(drafter, prompt, "a") <= first - 128
    assert prefill(drafter, prompt, "b") <= first - 128
    books_are_closed(drafter)


def test_a_text_longer_than_the_drafts_context_is_not_drafted_for() -> None:
    drafter = cross_drafter("permuted", pages=12)
    short, long = make_sequence(words(80, 1)), make_sequence(words(480, 2))
    one, other = drafter.propose([task_for(long, 30), task_for(short, 30)])
    assert len(one) == 1
    assert len(other) == 31


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(40, 70),
    nodes=st.integers(0, 63),
    depth=st.integers(0, 20),
    width=st.integers(1, 8),
)
def test_caps_are_obeyed(seed: int, length: int, nodes: int, depth: int, width: int) -> None:
    rng = random.Random(seed)
    drafter = shared_drafter()
    sequence = make_sequence([rng.randrange(VOCAB) for _ in range(length)])
    (tree,) = drafter.propose([task_for(sequence, nodes, depth, width, temperature=rng.choice(TEMPERATURES))])
    drafter.end(sequence)
    check_tree(tree, VOCAB, 0)
    assert len(tree) - 1 <= nodes
    assert max(tree.depths) <= depth
    # The target's own spelling may come on top, once.
    counts = [tree.parents.count(node) for node in range(len(tree))]
    assert sum(max(0, count - width) for count in counts) <= 1


@functools.cache
def shared_drafter() -> CrossVocabularyDrafter:
    return cross_drafter()


def test_a_forced_tree_reaches_its_depth() -> None:
    """When probabilities do not decide, the budget is spread over the levels."""
    drafter = cross_drafter("permuted")
    sequence = make_sequence(words(90, 3))
    (tree,) = drafter.propose([task_for(sequence, 7, 7, 3, allowed_token_ids=word_ids())])
    assert max(tree.depths) == 7


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from(TEMPERATURES))
def test_tokens_that_the_target_may_not_generate_are_not_proposed(seed: int, temperature: float) -> None:
    rng = random.Random(seed)
    drafter = shared_drafter()
    sequence = make_sequence([rng.randrange(VOCAB) for _ in range(50)])
    allowed = tuple(rng.sample(range(VOCAB), rng.choice((3, 40, 200))))
    (tree,) = drafter.propose([task_for(sequence, 40, 6, 3, temperature=temperature, allowed_token_ids=allowed)])
    drafter.end(sequence)
    assert set(tree.tokens[1:]) <= set(allowed)


class Alternating:
    """A grammar in which the sum of a text's tokens so far decides which residue may follow."""

    error = ""

    def __init__(self) -> None:
        self.total = 0

    def may(self, path: Seq[int], token: int) -> bool:
        return token % 3 != (self.total + sum(path)) % 3

    def mask(self, path: Seq[int]) -> NDArray[np.uint32]:
        bits = np.array([self.may(path, token) for token in range(VOCAB)], np.uint8)
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def commit(self, tokens: Iterable[int]) -> Alternating:
        self.total += sum(tokens)
        return self


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from(TEMPERATURES))
def test_a_grammar_is_obeyed(seed: int, temperature: float) -> None:
    rng, grammar = random.Random(seed), Alternating()
    drafter = shared_drafter()
    sequence = make_sequence([rng.randrange(VOCAB) for _ in range(50)])
    params = SamplingParams(temperature=temperature)
    sampling = SequenceSampling(params, StoppingParams(), 5, VOCAB, (), sequence.tokens, grammar)
    (tree,) = drafter.propose([DraftTask(sampled_by(sequence, sampling), 40, 6, 3, "model")])
    drafter.end(sequence)
    for node in range(1, len(tree)):
        assert grammar.may(tree.path_tokens(tree.parents[node]), tree.tokens[node])


def test_a_word_without_equivalent_is_split() -> None:
    """The filters above have no effect unless such words are proposed."""
    drafter, found = shared_drafter(), 0
    rng = random.Random(1)
    for _ in range(20):
        sequence = make_sequence([rng.randrange(VOCAB) for _ in range(50)])
        (tree,) = drafter.propose([task_for(sequence, 40, 6, 1)])
        drafter.end(sequence)
        found += sum(
            abs(score - tree.scores[tree.parents[n]] - np.log(0.95)) < 1e-9 for n, score in enumerate(tree.scores)
        )
    assert found > 0


def test_a_partial_character_is_completed_first() -> None:
    drafter, tokenizer = cross_drafter(), model("target").tokenizer
    ids = tokenizer.encode("you said 世", add_special=False)
    sequence = make_sequence(ids[:-1])
    (tree,) = drafter.propose([task_for(sequence)])
    assert len(tree) == 1
    sequence.tokens.append(ids[-1])
    (tree,) = drafter.propose([task_for(sequence)])
    assert len(tree) > 1


def test_an_empty_text_is_not_drafted_for() -> None:
    drafter, tokenizer = cross_drafter(), model("target").tokenizer
    end = tokenizer.token_id("<|im_end|>")  # the draft has no such token
    assert end is not None
    sequence = make_sequence([end])
    (tree,) = drafter.propose([task_for(sequence)])
    assert len(tree) == 1
    sequence.tokens += tokenizer.encode("the", add_special=False)
    (tree,) = drafter.propose([task_for(sequence)])
    assert len(tree) > 1


def test_a_warm_up_allocates_no_pages() -> None:
    drafter = cross_drafter()
    for rows in (1, 8, 64):
        drafter.warm_up(rows)
    assert drafter._kv.n_free == drafter._kv.n_total


def test_a_step_in_which_it_cannot_begin_measures_no_level() -> None:
    """Behind the prompt, which is read by a long forward, every text ends in a part of a character."""
    made, tokenizer = parts("other"), model("target").tokenizer
    engine, begin = fresh(made), [token for token in range(VOCAB) if tokenizer.token_bytes(token) == b"\xe4"]
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=tuple(begin))
    stopping = StoppingParams(max_tokens=30, ignore_eos=True)
    speculation = SpeculationParams(SpeculationMode.ON, ("model",))
    engine.submit(Request("a", words(60, 1), sampling, stopping, speculation=speculation))
    finished(engine)
    assert not engine._speculation.controller.estimates.costs["model"].level.known
