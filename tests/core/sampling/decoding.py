"""Decoding with the sampler under test: plain, and through token trees. Many seeds in one batch, one row each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from specdec.core.sampling import Sampler, SequenceSampling
from specdec.core.types import SamplingParams, StoppingParams
from tests.core.sampling.table_model import TableModel
from verify_kernels.sampling import RowSampling, SamplingKernels

Output = tuple[int, ...]
Propose = Callable[[list["Decoding"], list["Node"], "Implementation"], list[list[int]]]


@dataclass(frozen=True)
class Implementation:
    """Code under test. ``rekey`` may corrupt a row, given its depth in the tree; ``reads_parent`` corrupts logits."""

    kernels: SamplingKernels
    sequence: type[SequenceSampling] = SequenceSampling
    rekey: Callable[[RowSampling, int], RowSampling] = lambda row, depth: row
    reads_parent: bool = False


@dataclass(frozen=True)
class Problem:
    """A model, parameters, a prompt and how many tokens to decode."""

    model: TableModel
    params: SamplingParams
    length: int
    prompt: tuple[int, ...] = (0, 1)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    eos_ids: tuple[int, ...] = ()


@dataclass
class Decoding:
    """A running sequence: its sampling state and its output."""

    problem: Problem
    seed: int
    sampling: SequenceSampling
    output: list[int] = field(default_factory=list)

    def row(self, path: Sequence[int]) -> RowSampling:
        """The row of a node reached by ``path``."""
        done = len(self.output) + len(path)
        return self.sampling.row(len(self.problem.prompt) + done, path, done)

    def context(self, path: Sequence[int]) -> list[int]:
        """All tokens up to a node."""
        return [*self.problem.prompt, *self.output, *path]


@dataclass
class Node:
    """A tree node: its sequence, the draft tokens down to it, its children by token, the token sampled there."""

    owner: int
    path: Output
    children: dict[int, Node] = field(default_factory=dict)
    choice: int = -1


def start(problem: Problem, seeds: Sequence[int], implementation: Implementation) -> list[Decoding]:
    """Fresh decodings, one per seed."""
    sequence = partial(
        implementation.sequence,
        sampling=problem.params,
        stopping=problem.stopping,
        vocab_size=problem.model.vocab,
        eos_ids=problem.eos_ids,
        prompt_ids=problem.prompt,
    )
    return [Decoding(problem, seed, sequence(seed=seed)) for seed in seeds]


def choose(decodings: list[Decoding], nodes: list[Node], implementation: Implementation) -> None:
    """Sample every node's token in one call."""
    rows = [implementation.rekey(decodings[n.owner].row(n.path), len(n.path)) for n in nodes]
    paths = [n.path[:-1] if implementation.reads_parent else n.path for n in nodes]
    contexts = [decodings[n.owner].context(path) for n, path in zip(nodes, paths, strict=True)]
    logits = decodings[0].problem.model.logits(contexts)
    for node, (token, _) in zip(nodes, Sampler(implementation.kernels).sample(logits, rows), strict=True):
        node.choice = token


def decode_plainly(problem: Problem, seeds: Sequence[int], implementation: Implementation) -> list[Output]:
    """One token per step: the tree of one node."""
    decodings = start(problem, seeds, implementation)
    for _ in range(problem.length):
        roots = [Node(i, ()) for i in range(len(decodings))]
        choose(decodings, roots, implementation)
        for decoding, root in zip(decodings, roots, strict=True):
            _commit(decoding, [root.choice])
    return [tuple(d.output) for d in decodings]


def decode_by_trees(
    problem: Problem, seeds: Sequence[int], implementation: Implementation, propose: Propose, depth: int
) -> list[Output]:
    """Trees of ``depth`` drafted levels: sample all nodes, go to the child that holds the choice, else stop there."""
    decodings = start(problem, seeds, implementation)
    while running := [d for d in decodings if len(d.output) < problem.length]:
        roots = [Node(i, ()) for i in range(len(running))]
        nodes, level = list(roots), roots
        for _ in range(depth):
            level = _grow(running, level, propose, implementation)
            nodes += level
        choose(running, nodes, implementation)
        for decoding, root in zip(running, roots, strict=True):
            _commit(decoding, _walk(root))
    return [tuple(d.output) for d in decodings]


def _grow(decodings: list[Decoding], level: list[Node], propose: Propose, implementation: Implementation) -> list[Node]:
    if not level:
        return []
    grown: list[Node] = []
    for node, tokens in zip(level, propose(decodings, level, implementation), strict=True):
        for token in tokens:
            node.children[token] = Node(node.owner, (*node.path, token))
        grown += node.children.values()
    return grown


def _walk(root: Node) -> list[int]:
    tokens, node = [root.choice], root
    while node.choice in node.children:
        node = node.children[node.choice]
        tokens.append(node.choice)
    return tokens


def _commit(decoding: Decoding, tokens: list[int]) -> None:
    tokens = tokens[: decoding.problem.length - len(decoding.output)]
    decoding.sampling.commit(tokens)
    decoding.output += tokens


def random_children(seed: int) -> Propose:
    """Proposes none to three random tokens under each node."""
    rng = random.Random(seed)

    def propose(decodings: list[Decoding], level: list[Node], implementation: Implementation) -> list[list[int]]:
        tokens = range(decodings[0].problem.model.vocab)
        return [rng.sample(tokens, rng.randrange(4)) for _ in level]

    return propose


def coupled_children(draft: TableModel, width: int) -> Propose:
    """Proposes like a draft model: its best tokens by the target's own noise and filters."""

    def propose(decodings: list[Decoding], level: list[Node], implementation: Implementation) -> list[list[int]]:
        rows = [implementation.rekey(decodings[n.owner].row(n.path), len(n.path)) for n in level]
        logits = draft.logits([decodings[n.owner].context(n.path) for n in level])
        children = Sampler(implementation.kernels).children(logits, rows, width)
        return [[token for token, _ in found] for found in children]

    return propose
