"""A draft's tokens in the target's own tokenization: what is added, what is lowered, and what is unchanged."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.growth import Growth
from draft.protocol import DraftTask
from draft.retokenize import NONCANONICAL_LOGPROB, add_canonical_path
from specdec.core.sampling import SequenceSampling
from specdec.core.tree import TokenTree
from specdec.core.types import SamplingParams, StoppingParams
from specdec.models.tokenizer import Tokenizer
from tests.draft.helpers import make_sequence, sampled_by
from tests.draft.tiny_drafts import wordy_tokenizer

CELL = 17


@functools.cache
def target() -> Tokenizer:
    return wordy_tokenizer(("implementation", "the", "ation"), ("<|end|>",))


def token(text: str) -> int:
    found = [t for t in range(target().vocab_size) if target().token_bytes(t) == text.encode()]
    assert len(found) == 1, f"{text!r} is no token"
    return found[0]


def growth(allowed: Seq[int] = (), nodes: int = 30) -> Growth:
    """A growth at a text's end; every node it adds counts in calibration cell `CELL`."""
    params = SamplingParams(temperature=0.0, allowed_token_ids=tuple(allowed))
    sampling = SequenceSampling(params, StoppingParams(), 1, target().vocab_size, (), (5,))
    task = DraftTask(
        sampled_by(make_sequence([5]), sampling),
        nodes,
        30,
        8,
        "model",
        lambda rank, depth, prob: (math.log(prob), CELL),
    )
    return Growth(task, TokenTree(5), 0, [0], [5])


def say(grown: Growth, likelihoods: list[float], words: Seq[str | int], chance: float = 0.5, parent: int = 0) -> int:
    """A path of own nodes, one per token, each as likely as ``chance``; returns the last."""
    for word in words:
        piece = word if isinstance(word, int) else token(word)
        anchor = grown.task.add(grown.tree, grown.anchors[parent], piece, chance)
        parent = grown.add(parent, 1000 + len(grown.tokens), anchor)
        likelihoods.append(math.log(chance))
    return parent


def state(tree: TokenTree) -> tuple[list[int], list[int], list[float], list[int]]:
    return list(tree.tokens), list(tree.parents), list(tree.scores), list(tree.cells)


def test_two_tokens_become_one() -> None:
    grown, chances = growth(), [0.0]
    say(grown, chances, ["implement", "ation"])
    add_canonical_path(grown, chances, target())
    tree = grown.tree
    first, second = 1, 2
    joined = tree.child(0, token("implementation"))
    assert joined == 3
    assert len(tree) == 4
    assert tree.scores[joined] == pytest.approx(2 * math.log(0.5))
    assert tree.cells[joined] == CELL
    assert tree.scores[first] == pytest.approx(math.log(0.5) + NONCANONICAL_LOGPROB)
    assert tree.scores[second] == pytest.approx(2 * math.log(0.5) + NONCANONICAL_LOGPROB)
    assert tree.cells[first] == tree.cells[second] == -1


def test_the_text_before_keeps_its_score() -> None:
    grown, chances = growth(), [0.0]
    say(grown, chances, ["the", " ", "implement", "ation", "!"])
    add_canonical_path(grown, chances, target())
    tree = grown.tree
    assert [tree.cells[node] for node in range(1, 6)] == [CELL, CELL, -1, -1, -1]
    assert tree.scores[2] == pytest.approx(2 * math.log(0.5))
    joined = tree.child(2, token("implementation"))
    assert joined is not None
    end = tree.child(joined, token("!"))
    assert end is not None
    assert tree.scores[end] == pytest.approx(5 * math.log(0.5))


def test_the_targets_own_tokenization_is_unchanged() -> None:
    grown, chances = growth(), [0.0]
    say(grown, chances, ["the", " ", "implementation"])
    before = state(grown.tree)
    add_canonical_path(grown, chances, target())
    assert state(grown.tree) == before


def test_an_empty_proposal_is_unchanged() -> None:
    grown = growth()
    add_canonical_path(grown, [0.0], target())
    assert len(grown.tree) == 1


def test_other_branches_keep_their_scores() -> None:
    grown, chances = growth(), [0.0]
    say(grown, chances, ["implement", "ation"], 0.6)
    say(grown, chances, ["the", "!"], 0.3)
    add_canonical_path(grown, chances, target())
    tree = grown.tree
    other = tree.child(0, token("the"))
    assert other is not None
    assert tree.scores[other] == pytest.approx(math.log(0.3))
    assert tree.cells[other] == tree.cells[other + 1] == CELL


def test_the_likeliest_path_is_retokenized() -> None:
    grown, chances = growth(), [0.0]
    say(grown, chances, ["implement", "ation"], 0.2)
    say(grown, chances, ["the", "!"], 0.6)
    before = state(grown.tree)
    add_canonical_path(grown, chances, target())
    assert state(grown.tree) == before


def test_an_existing_token_gets_a_higher_score() -> None:
    grown, chances = growth(), [0.0]
    say(grown, chances, ["implement", "ation"], 0.6)
    say(grown, chances, ["implementation"], 0.1)
    add_canonical_path(grown, chances, target())
    tree = grown.tree
    assert len(tree) == 4
    assert tree.scores[3] == pytest.approx(2 * math.log(0.6))


def test_a_word_of_several_tokens_has_one_probability() -> None:
    """The draft proposed "implementation" as one token, and here it is split into "implement" + "ation"."""
    grown, chances = growth(), [0.0]
    tree = grown.tree
    first = grown.task.add(tree, 0, token("implement"), 0.5)
    second = grown.task.add(tree, first, token("ation"), 0.9)
    grown.add(0, 999, second)
    chances.append(math.log(0.5))
    add_canonical_path(grown, chances, target())
    joined = tree.child(0, token("implementation"))
    assert joined is not None
    assert tree.scores[joined] == pytest.approx(math.log(0.5))


def test_probabilities_go_to_the_token_with_the_byte() -> None:
    grown, chances = growth(), [0.0]
    parent = say(grown, chances, ["impl"], 0.8)
    parent = say(grown, chances, ["e"], 0.7, parent)
    say(grown, chances, ["m", "e"], 0.6, parent)
    add_canonical_path(grown, chances, target())
    tree = grown.tree
    joined = tree.child(0, token("impleme"))
    assert joined is not None
    assert tree.scores[joined] == pytest.approx(math.log(0.8 * 0.7 * 0.6 * 0.6))


def test_a_request_that_forbids_the_word_keeps_the_tokens() -> None:
    grown, chances = growth(allowed=(token("implement"), token("ation"))), [0.0]
    say(grown, chances, ["implement", "ation"])
    before = state(grown.tree)
    add_canonical_path(grown, chances, target())
    assert state(grown.tree) == before


def test_special_tokens_are_not_text() -> None:
    grown, chances = growth(), [0.0]
    say(grown, chances, ["implement", "ation", "<|end|>"])
    before = state(grown.tree)
    add_canonical_path(grown, chances, target())
    assert state(grown.tree) == before


def test_a_partial_character_is_not_text() -> None:
    grown, chances = growth(), [0.0]
    half = target().encode("世", add_special=False)[0]
    say(grown, chances, ["implement", "ation", half])
    before = state(grown.tree)
    add_canonical_path(grown, chances, target())
    assert state(grown.tree) == before


def test_a_full_tree_is_accepted() -> None:
    grown, chances = growth(nodes=2), [0.0]
    say(grown, chances, ["implement", "ation"])
    add_canonical_path(grown, chances, target())
    assert len(grown.tree) == 3


@settings(max_examples=100)
@given(data=st.data(), nodes=st.integers(1, 20))
def test_any_tree(data: st.DataObject, nodes: int) -> None:
    """Nothing is lost, only nodes that differ from the target's tokenization are lowered, and that tokenization is
    present."""
    grown, chances = growth(nodes=nodes), [0.0]
    size = target().vocab_size
    pieces = st.one_of(
        st.sampled_from([token(w) for w in ("imp", "implement", "ation", "a", "t", "the", " ", "i", "o", "n")]),
        st.integers(0, size - 1),
    )
    for _ in range(data.draw(st.integers(0, 15))):
        parent = data.draw(st.integers(0, len(grown.tokens) - 1))
        chance = data.draw(st.floats(0.05, 0.99))
        anchor = grown.task.add(grown.tree, grown.anchors[parent], data.draw(pieces), chance)
        if anchor >= 0:
            grown.add(parent, 0, anchor)
            chances.append(math.log(chance))
    tree = grown.tree
    tokens, parents, scores, _ = state(tree)
    add_canonical_path(grown, chances, target())
    assert tree.tokens[: len(tokens)] == tokens
    assert tree.parents[: len(parents)] == parents
    assert len(tree) - 1 <= nodes
    assert all(tree.scores[node] <= tree.scores[tree.parents[node]] for node in range(1, len(tree)))
    lowered = [n for n in range(len(scores)) if tree.scores[n] < scores[n]]
    assert all(tree.cells[n] == -1 for n in lowered)
    assert all(tree.parents[n] == lowered[0] or tree.parents[n] in lowered for n in lowered[1:])
