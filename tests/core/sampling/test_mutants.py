"""Broken samplers: each must fail the check that guards against it, and the sound one must pass the same check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

import verify_kernels.reference.sampling as reference
from specdec.core.sampling import SequenceSampling
from tests.core.sampling.checks import PROBLEMS, follows_the_law, trees_change_nothing
from tests.core.sampling.decoding import Implementation, Problem
from tests.core.sampling.natives import native_sampling
from verify_kernels.noise import gumbel
from verify_kernels.reference.sampling import Ids, ReferenceSampling, Row, min_p, top_k, top_p
from verify_kernels.sampling import RowSampling, SamplingPolicy

Check = Callable[[Implementation, Problem, Sequence[int]], bool]


class TopPFirst(ReferenceSampling):
    """Filters in the wrong order."""

    def filter(self, z: Row, policy: SamplingPolicy) -> Ids:
        """Top-p of the whole, then top-k."""
        return min_p(z, top_k(z, top_p(z, reference.ranked(z), policy.top_p), policy.top_k), policy.log_min_p)


class TopPOneMore(ReferenceSampling):
    """Keeps the token after the one that reaches p."""

    def filter(self, z: Row, policy: SamplingPolicy) -> Ids:
        """One token too many."""
        order = reference.ranked(z)
        return order[: len(top_p(z, order, policy.top_p)) + 1]


class TopPOneLess(ReferenceSampling):
    """Drops the token that reaches p."""

    def filter(self, z: Row, policy: SamplingPolicy) -> Ids:
        """One token too few."""
        kept = top_p(z, reference.ranked(z), policy.top_p)
        return kept[: max(1, len(kept) - 1)]


class FiltersBeforeTemperature(ReferenceSampling):
    """Top-p over the distribution at temperature 1."""

    def filter(self, z: Row, policy: SamplingPolicy) -> Ids:
        """Undoes the division, then filters."""
        return super().filter(z * np.float32(policy.temperature), policy)


class PathForgotten(SequenceSampling):
    """Penalties see committed tokens only."""

    def row(self, position: int, path: Sequence[int], n_output: int) -> RowSampling:
        """As if there were no path."""
        return super().row(position, (), n_output)


class CommitForgotten(SequenceSampling):
    """Penalties never see an output token."""

    def commit(self, tokens: Iterable[int]) -> None:
        """Counts nothing."""


class OutputNotCounted(SequenceSampling):
    """The min_tokens rule counts committed tokens only."""

    def row(self, position: int, path: Sequence[int], n_output: int) -> RowSampling:
        """As if the path were no output."""
        return super().row(position, path, n_output - len(path))


def position_ignored(row: RowSampling, depth: int) -> RowSampling:
    """One noise for all positions."""
    return row._replace(position=0)


def depth_for_position(row: RowSampling, depth: int) -> RowSampling:
    """The noise of a node's depth in its tree."""
    return row._replace(position=depth)


def seed_ignored(row: RowSampling, depth: int) -> RowSampling:
    """One noise for all seeds."""
    return row._replace(policy=replace(row.policy, seed=0))


@dataclass(frozen=True)
class Mutant:
    """A fault, and the check and problem that must show it."""

    make: Callable[[], Implementation]
    check: Check
    problem: str
    seeds: int = 4000


def _native(**changes: object) -> Callable[[], Implementation]:
    return lambda: Implementation(native_sampling(), **changes)  # type: ignore[arg-type]


def _reference(kernels: type[ReferenceSampling]) -> Callable[[], Implementation]:
    return lambda: Implementation(kernels())


MUTANTS = {
    "noise ignores position": Mutant(_native(rekey=position_ignored), follows_the_law, "plain"),
    "noise ignores seed": Mutant(_native(rekey=seed_ignored), follows_the_law, "plain"),
    "noise by depth, law": Mutant(_native(rekey=depth_for_position), follows_the_law, "plain"),
    "noise by depth, trees": Mutant(_native(rekey=depth_for_position), trees_change_nothing, "plain", 200),
    "the parent's logits": Mutant(_native(reads_parent=True), trees_change_nothing, "plain", 200),
    "top-p before top-k": Mutant(_reference(TopPFirst), follows_the_law, "top-k then top-p", 1500),
    "top-p one more": Mutant(_reference(TopPOneMore), follows_the_law, "top-p", 1500),
    "top-p one less": Mutant(_reference(TopPOneLess), follows_the_law, "top-p", 1500),
    "temperature last": Mutant(_reference(FiltersBeforeTemperature), follows_the_law, "top-k then top-p", 1500),
    "path not penalised": Mutant(_native(sequence=PathForgotten), trees_change_nothing, "penalties", 400),
    "commit not penalised": Mutant(_native(sequence=CommitForgotten), follows_the_law, "penalties"),
    "path not counted": Mutant(_native(sequence=OutputNotCounted), trees_change_nothing, "everything", 400),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_sampler_fails_its_check(name: str) -> None:
    mutant = MUTANTS[name]
    assert not mutant.check(mutant.make(), PROBLEMS[mutant.problem], range(mutant.seeds))


@pytest.mark.parametrize(
    ("check", "problem", "seeds"), sorted({(m.check, m.problem, m.seeds) for m in MUTANTS.values()}, key=str)
)
def test_the_correct_sampler_passes_the_same_checks(check: Check, problem: str, seeds: int) -> None:
    assert check(Implementation(native_sampling()), PROBLEMS[problem], range(seeds))


def test_noise_shared_by_the_tokens_of_a_call_fails_the_test_of_the_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are four to a Philox call; forgetting the lane would give all of them one noise."""

    def shared(seed: int, position: int, tokens: Ids) -> np.ndarray:
        return gumbel(seed, position, tokens >> 2 << 2)

    monkeypatch.setattr(reference, "gumbel", shared)
    assert not follows_the_law(Implementation(ReferenceSampling()), PROBLEMS["plain"], range(1000))
