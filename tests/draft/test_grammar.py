"""Drafts of text that a grammar forces."""

from __future__ import annotations

import math

from draft.grammar import GrammarDrafter
from draft.protocol import DraftTask
from specdec.control.inputs import Match
from specdec.core.sampling import SequenceSampling
from specdec.core.types import GrammarKind, GrammarParams, SamplingParams, StoppingParams
from tests.draft.helpers import make_sequence, make_task, sampled_by
from tests.grammar.helpers import EOS, byte_level, ids_of, start

HELLO = GrammarParams(GrammarKind.CHOICE, '["hello there", "hello world"]')
PENDING = 40


def task_at(output: str, nodes: int = 31, depth: int = 31, floor: float = -math.inf) -> DraftTask:
    """A turn after ``output`` was committed; the pending token is its last, or the prompt's."""
    tokens = byte_level().encode(output)
    sampling = SequenceSampling(SamplingParams(), StoppingParams(), 1, 384, (EOS,), (PENDING,), start(HELLO))
    sampling.commit(tokens)
    return DraftTask(sampled_by(make_sequence([PENDING, *tokens]), sampling), nodes, depth, 2, "grammar", floor=floor)


def drafted(task: DraftTask) -> bytes:
    (tree,) = GrammarDrafter().propose([task])
    assert tree.tokens[0] == task.sequence.tokens[-1]
    assert tree.parents == list(range(-1, len(tree) - 1))  # a chain
    assert all(sources == ("grammar",) for sources in tree.sources[1:])
    return b"".join(byte_level().token_bytes(token) for token in tree.tokens[1:] if token != EOS)


def test_the_forced_text_and_the_end_are_drafted_as_a_chain() -> None:
    assert b"hello ".startswith(drafted(task_at("")))
    assert len(drafted(task_at(""))) >= len(b"hello")
    task = task_at("hello w")
    assert drafted(task) == b"orld"
    (tree,) = GrammarDrafter().propose([task])
    assert tree.tokens[-1] == EOS
    assert tree.scores[-1] > math.log(0.8)
    for node in range(1, len(tree)):
        assert tree.tokens[node] in ids_of(task.sequence.sampling.row(0, tree.path_tokens(node - 1), 0).mask)


def test_budget_and_floor_are_obeyed() -> None:
    whole = GrammarDrafter().propose([task_at("hello w")])[0].tokens
    assert len(whole) > 3
    for changes in ({"nodes": 2}, {"depth": 2}, {"floor": 2.5 * math.log(0.99)}):
        assert GrammarDrafter().propose([task_at("hello w", **changes)])[0].tokens == whole[:3]
    assert len(GrammarDrafter().propose([task_at("hello w", nodes=0)])[0]) == 1


def test_there_is_a_match_where_a_token_is_forced() -> None:
    """ "hello" leaves open how its text goes on in tokens; behind the whole text the end is forced."""
    sequences = [task_at(text).sequence for text in ("", "hello", "hello w", "hello there")]
    found = GrammarDrafter().match([*sequences, make_sequence([1])])
    assert found == [Match.STRONG, Match.NONE, Match.STRONG, Match.STRONG, Match.NONE]


def test_only_sequences_with_a_grammar_are_served() -> None:
    drafter = GrammarDrafter()
    assert drafter.serves(make_sequence([1], grammar=HELLO))
    assert not drafter.serves(make_sequence([1], healing_prefix="na"))
    assert not drafter.serves(make_sequence([1]))


def test_without_a_forced_token_nothing_is_proposed() -> None:
    drafter = GrammarDrafter()
    assert not drafter.model_based
    trees = drafter.propose([make_task(make_sequence([1, 2, 3])), task_at("hello there"), task_at("hello w")])
    assert [len(tree) > 1 for tree in trees] == [False, True, True]
    ended = task_at("hello there")
    ended.sequence.sampling.commit([EOS])
    assert len(drafter.propose([ended])[0]) == 1
