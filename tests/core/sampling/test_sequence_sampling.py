"""The sequence's side and the sampler's interface: which rows are built, what is rejected, what is returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.core.sampling import Sampler, SequenceSampling
from specdec.core.types import SamplingParams, StoppingParams, draw_seed, sample_seed
from tests.core.sampling.natives import native_sampling
from verify_kernels.reference.sampling import ReferenceSampling, processed_logits
from verify_kernels.sampling import NO_TOKEN, SamplingPolicy

TOKENS = st.integers(0, 19)


def sequence(stopping: StoppingParams | None = None, prompt: tuple[int, ...] = (), **changes: Any) -> SequenceSampling:
    """A sequence over 20 tokens whose EOS is 19."""
    return SequenceSampling(SamplingParams(**changes), stopping or StoppingParams(), 5, 20, (19,), prompt)


def processed(row: Any) -> list[float]:
    """The row's output for twenty zeros and ones."""
    return processed_logits(np.arange(20, dtype=np.float32) % 3 - 1, row).tolist()


def test_a_plain_row_has_no_parameters() -> None:
    row = sequence(temperature=0.0, prompt=(1, 2)).row(9, (3, 4), 2)
    assert (row.position, row.edits, row.path, row.ban) == (9, None, (), False)


@settings(max_examples=80)
@given(st.lists(TOKENS), st.lists(TOKENS, max_size=70), st.lists(TOKENS, max_size=6), st.integers(0, 3))
def test_a_path_counts_as_if_it_were_committed(prompt: list[int], output: list[int], path: list[int], cut: int) -> None:
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    ahead, behind = sequence(prompt=tuple(prompt), **penalties), sequence(prompt=tuple(prompt), **penalties)
    ahead.commit([*output, *path])
    behind.commit(output[:cut])
    behind.row(0, path, 0)  # looking at a node must leave no trace
    behind.commit(output[cut:])
    done = len(output) + len(path)
    assert processed(ahead.row(1, (), done)) == processed(behind.row(1, path, done))


def test_min_tokens_bans_eos_and_stop_ids_until_it_is_reached() -> None:
    banning = sequence(StoppingParams(min_tokens=2, stop_token_ids=(3, 999)))
    banned = [token for token, z in enumerate(processed(banning.row(0, (), 1))) if z == -np.inf]
    assert banned == [3, 19]
    assert banning.row(0, (), 2).edits is None


def test_a_ban_of_every_token_is_ignored() -> None:
    stopping = StoppingParams(min_tokens=5, stop_token_ids=(3,))
    assert np.isfinite(processed(sequence(stopping, allowed_token_ids=(3, 19)).row(0, (), 0))).sum() == 2
    assert np.isfinite(processed(sequence(stopping, allowed_token_ids=(3, 4)).row(0, (), 0))).sum() == 1


def test_bias_and_allowed_ids() -> None:
    z = processed(sequence(logit_bias=((4, 2.5), (4, 1.0)), allowed_token_ids=(4, 0, 19, 4)).row(0, (), 0))
    assert {token: value for token, value in enumerate(z) if value != -np.inf} == {0: -1.0, 4: 3.5, 19: 0.0}


def test_logprobs_are_returned_if_requested_and_from_the_raw_logits() -> None:
    logits = torch.zeros(3, 20)
    logits[:, 7] = 4.0
    rows = [sequence(temperature=0.0, logit_bias=((2, 50.0),)).row(0, (), 0)] * 3
    tokens, (none, chosen, top) = zip(*Sampler(ReferenceSampling()).sample(logits, rows, [None, 0, 2]), strict=True)
    expected = torch.log_softmax(logits[0].double(), 0)
    assert tokens == (2, 2, 2)
    assert none is None
    assert chosen is not None
    assert top is not None
    assert (chosen.token_id, chosen.top) == (2, [])
    assert chosen.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    assert [token for token, _ in top.top] == [7, 0]
    assert [value for _, value in top.top] == pytest.approx([float(expected[7]), float(expected[0])], abs=1e-6)


def test_a_broken_row_affects_no_other() -> None:
    logits = torch.stack([torch.full((20,), torch.nan), torch.arange(20.0)])
    rows = [sequence(temperature=0.0).row(0, (), 0)] * 2
    tokens, logprobs = zip(*Sampler(ReferenceSampling()).sample(logits, rows, [1, 1]), strict=True)
    assert tokens == (NO_TOKEN, 19)
    assert logprobs[0] is None
    assert logprobs[1] is not None


def test_the_sampler_rejects_unreadable_logits() -> None:
    sampler, row = Sampler(ReferenceSampling()), sequence().row(0, (), 0)
    for logits in (
        torch.zeros(2, 20),
        torch.zeros(1, 20, dtype=torch.bfloat16),
        torch.zeros(20),
        torch.zeros(20, 2).t(),
    ):
        with pytest.raises(ValueError, match="logits"):
            sampler.sample(logits, [row])
    with pytest.raises(ValueError, match="width"):
        sampler.children(torch.zeros(1, 20), [row], 0)
    assert sampler.sample(torch.zeros(0, 20), []) == []
    assert sampler.children(torch.zeros(0, 20), [], 2) == []


def test_children_are_distinct_and_at_most_as_many_as_the_filter_keeps() -> None:
    rows = [sequence(top_k=3).row(position, (), 0) for position in range(50)]
    children = Sampler(ReferenceSampling()).children(torch.randn(50, 20), rows, 5)
    assert all(len(found) == 3 == len({token for token, _ in found}) for found in children)


@given(st.integers(0, 2**64 - 1))
def test_sample_seeds(seed: int) -> None:
    seeds = [sample_seed(seed, index) for index in range(50)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 50
    assert all(0 <= s < 2**64 for s in seeds)


def test_seeds_are_stable() -> None:
    assert sample_seed(42, 1) == GOLDEN
    assert draw_seed() != draw_seed()
    assert all(float(seed) == seed < 1 << 53 for seed in (draw_seed() for _ in range(99)))  # as JavaScript has numbers


GOLDEN = 18220876575004849820


class StubGrammar:
    """Allows 3 to 6, and after a path that ends in 6 only the end token; records what was committed."""

    error = ""

    def __init__(self) -> None:
        self.committed: list[int] = []

    def mask(self, path: Sequence[int]) -> NDArray[np.uint32]:
        last = [*self.committed, *path][-1:]
        return np.asarray([1 << 19 if last == [6] else 0b1111000], np.uint32)

    def commit(self, tokens: Iterable[int]) -> StubGrammar:
        self.committed += tokens
        return self


def constrained(stopping: StoppingParams | None = None, **changes: Any) -> SequenceSampling:
    return SequenceSampling(SamplingParams(**changes), stopping or StoppingParams(), 5, 20, (19,), (), StubGrammar())


def possible(row: Any) -> list[int]:
    """The tokens a row leaves, by both samplers' reading of it."""
    left = np.flatnonzero(np.isfinite(processed(row))).tolist()
    logits = torch.from_numpy(np.arange(20, dtype=np.float32)[None] % 3 - 1)
    warm = row._replace(policy=SamplingPolicy(seed=1))
    for kernels in (ReferenceSampling(), native_sampling()):
        (children,) = Sampler(kernels).children(logits, [warm], 20)
        assert sorted(token for token, _ in children) == left
    return left


def test_a_row_has_the_mask_of_its_node() -> None:
    ours = constrained(temperature=0.0)
    assert possible(ours.row(0, (), 0)) == [3, 4, 5, 6]
    assert possible(ours.row(1, (6,), 1)) == [19]
    assert possible(ours.row(2, (6, 4), 2)) == [3, 4, 5, 6]
    ours.commit(iter([4, 6]))
    assert possible(ours.row(2, (), 2)) == [19]


def test_a_grammar_combines_with_penalties_bias_and_allowed_ids() -> None:
    ours = constrained(logit_bias=((4, 2.5), (9, 50.0)), allowed_token_ids=(4, 5, 9, 19), presence_penalty=1.0)
    z = processed(ours.row(1, (4,), 1))
    assert {token: value for token, value in enumerate(z) if value != -np.inf} == {4: 1.5, 5: 1.0}
    assert possible(constrained(allowed_token_ids=(1, 19)).row(0, (), 0)) == []
    nothing = constrained(allowed_token_ids=(1,)).row(0, (), 0)
    assert Sampler(ReferenceSampling()).sample(torch.zeros(1, 20), [nothing]) == [(NO_TOKEN, None)]


def test_a_ban_is_ignored_if_the_grammar_allows_nothing_else() -> None:
    stopping = StoppingParams(min_tokens=5, stop_token_ids=(3, 4))
    ours = constrained(stopping)
    assert possible(ours.row(0, (), 0)) == [5, 6]
    assert possible(ours.row(1, (6,), 1)) == [19]  # the text is complete: it can only end
    assert possible(ours.row(5, (), 5)) == [3, 4, 5, 6]
    assert possible(constrained(stopping, allowed_token_ids=(3, 19)).row(0, (), 0)) == [3]
