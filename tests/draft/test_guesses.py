"""Guesses save forwards of a draft model, and whatever they are, they change no tree and no KV that is read again."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from draft import model
from draft.growth import Growth
from draft.model import MAX_GUESSES, ModelDrafter, NgramTable
from draft.protocol import DraftTask
from specdec.control.estimates.costs import CostTable
from specdec.control.inputs import TreeExpansion
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler, SequenceSampling
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import SamplingParams, StoppingParams
from tests.draft.helpers import make_sequence, sampled_by
from tests.draft.test_growth import CountingDecoder
from tests.draft.tiny_drafts import decoder, kernels

ALLOWED = tuple(range(5, 60))


class Scripted(NgramTable):
    """Guesses ``share`` of its tokens at random, in place of what the table holds."""

    def __init__(self, share: float, seed: int) -> None:
        super().__init__()
        self.share, self.rng = share, random.Random(seed)

    def guess(self, salt: str, before: int, last: int) -> list[int]:
        known = super().guess(salt, before, last)
        known += [0] * (MAX_GUESSES - len(known))
        return [self.rng.randrange(300) if self.rng.random() < self.share else token for token in known]


class Silent(NgramTable):
    """Guesses nothing."""

    def guess(self, salt: str, before: int, last: int) -> list[int]:
        return []


class Drafting:
    """A drafter with sequences and pages of its own."""

    def __init__(
        self, guesses: NgramTable, texts: Seq[Seq[int]], params: SamplingParams, max_rows: int | None = None
    ) -> None:
        self.decoder = CountingDecoder(decoder("target"), max_rows)
        vocab = self.decoder.inner.config.vocab_size
        self.drafter = ModelDrafter(self.decoder, Sampler(kernels().sampling), vocab)  # type: ignore[arg-type]
        self.drafter._table = guesses
        self.kv = KvCacheManager(40, prefix_cache=False)
        self.sequences = [self.begin(text, params) for text in texts]

    def begin(self, text: Seq[int], params: SamplingParams) -> Sequence:
        sequence = make_sequence(text)
        assert self.kv.admit(sequence) is not None
        return sampled_by(sequence, SequenceSampling(params, StoppingParams(), 1, 384, (), sequence.tokens))

    def propose(self, nodes: int, depth: int, width: int, expansion: TreeExpansion | None = None) -> list[TokenTree]:
        """Propose with pages for the tree and no more."""
        for sequence in self.sequences:
            assert self.kv.ensure(sequence, len(sequence.tokens) + min(nodes, depth))
        return self.drafter.propose(
            [DraftTask(s, nodes, depth, width, "model", expansion=expansion) for s in self.sequences]
        )

    def commit(self, tokens: Seq[Seq[int]]) -> None:
        for sequence, new in zip(self.sequences, tokens, strict=True):
            sequence.tokens += new
            sequence.sampling.commit(new)
            self.drafter.observe(sequence, new)


def columns(trees: Seq[TokenTree]) -> list[tuple[Any, ...]]:
    return [(tree.tokens, tree.parents, tree.scores) for tree in trees]


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=4),
    SamplingParams(temperature=0.0, allowed_token_ids=ALLOWED, presence_penalty=0.5),
], ids=["greedy", "sampled", "edited"])  # fmt: skip
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_guesses_change_no_tree(params: SamplingParams, share: float) -> None:
    """One to three sequences, whose next tokens are a path of their tree or none of it."""
    rng = random.Random(f"{share} {params}")
    for count, width in ((1, 1), (1, 3), (3, 1), (2, 3)):
        texts = [[rng.randrange(300) for _ in range(rng.choice((1, 2, 30, 57, 60, 63, 64)))] for _ in range(count)]
        plain, guessing = Drafting(Silent(), texts, params), Drafting(Scripted(share, count), texts, params)
        for _ in range(5):
            floor = TreeExpansion(None, 0.0, [0.0], 1.0, math.log(rng.choice((0.02, 0.1, 0.3))))
            shape = rng.randint(4, 16), rng.randint(1, 8), width, rng.choice((None, floor))
            trees = plain.propose(*shape)
            assert columns(guessing.propose(*shape)) == columns(trees)
            paths = [tree.path_tokens(rng.randrange(len(tree))) for tree in trees]
            new = [[*path, rng.choice(ALLOWED)] for path in paths]
            plain.commit(new)
            guessing.commit(new)


@pytest.mark.parametrize("max_rows", [9, 12, 16, 24])
def test_guesses_leave_the_rows_that_trees_need(max_rows: int) -> None:
    texts = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    plain, guessing = (
        Drafting(table, texts, SamplingParams(temperature=0.0), max_rows) for table in (Silent(), Scripted(0.5, 1))
    )
    for _ in range(3):
        assert columns(guessing.propose(12, 4, 3)) == columns(plain.propose(12, 4, 3))
        for drafting in (plain, guessing):
            drafting.commit([[20], [21], [22]])


def test_a_guess_is_no_node_of_another_branch() -> None:
    drafting = Drafting(NgramTable(), [[5, 6, 7]], SamplingParams(temperature=0.0))
    task = DraftTask(drafting.sequences[0], 9, 9, 2, "model")
    growth = Growth(task, TokenTree(7), 2, [0], [7])
    best, other = (growth.add(0, token, growth.tree.add(0, token, -1.0, "model", -1)) for token in (20, 21))
    growth.chain, growth.ahead = [0, best], [30]
    growth.frontier = [growth.add(other, 30, growth.tree.add(growth.anchors[other], 30, -1.5, "model", -1))]
    drafting.drafter._follow(growth, torch.zeros(1, 384))
    assert growth.chain == [0, best]
    assert len(growth.tree) == 4


def test_right_guesses_save_forwards() -> None:
    """A text drafted again is guessed from the first time's choices."""
    texts = [[5, 6, 7, 8]]
    drafting = Drafting(NgramTable(), texts, SamplingParams(temperature=0.0))
    first = drafting.propose(9, 9, 1)
    once = len(drafting.decoder.rows)
    drafting.sequences[0].draft_computed = 0
    assert columns(drafting.propose(9, 9, 1)) == columns(first)
    assert len(set(first[0].tokens)) > 4  # no loop of one token, which would be guessed at once
    again = len(drafting.decoder.rows) - once
    assert again == 9 // (MAX_GUESSES + 1) < once
    drafting.sequences[0].draft_computed = 0
    drafting.propose(2, 2, 1)
    assert drafting.decoder.rows[-1] == len(texts[0]) + 1  # a second guess would be for a third level


def test_texts_of_another_salt_are_not_guessed_from() -> None:
    table = NgramTable()
    table.add("ours", 1, 2, 3)
    assert table.guess("ours", 1, 2) == table.guess("ours", 9, 2) == [3]
    assert table.guess("theirs", 1, 2) == table.guess("", 9, 2) == []


def test_rows_are_guessed_only_where_they_are_cheap() -> None:
    def rows(ms_of_two: float, sequences: int = 1) -> int:
        texts = [[5, 6, 7, 8 + i] for i in range(sequences)]
        drafting = Drafting(NgramTable(), texts, SamplingParams(temperature=0.0))
        drafting.propose(9, 9, 1)
        for sequence in drafting.sequences:
            sequence.draft_computed = 0
        known = CostTable([1, 2, 4], [0], [[10.0, ms_of_two, 2 * ms_of_two]])
        before = len(drafting.decoder.rows)
        drafting.propose(9, 9, 1, TreeExpansion(known, 0.0, [0.0] * 40, 1.0))
        return max(drafting.decoder.rows[before + 1 :])

    assert rows(10.4) > 1
    assert rows(19.0) == 1


def test_what_follows_two_tokens_is_preferred() -> None:
    table = NgramTable()
    table.add("", 1, 2, 3)
    table.add("", 7, 2, 8)
    table.add("", 2, 3, 4)
    table.add("", 9, 3, 5)
    assert table.guess("", 1, 2) == [3, 4]
    assert table.guess("", 7, 2) == [8]
    assert table.guess("", 5, 2) == [8]
    assert table.guess("", 5, 6) == []


def test_no_other_salt_is_read() -> None:
    table = NgramTable()
    texts = {
        salt: make_sequence([random.Random(salt).randrange(200) for _ in range(400)], cache_salt=salt) for salt in "ab"
    }
    for sequence in texts.values():
        table.read(sequence)
    for salt, other in ("ab", "ba"):
        pairs = zip(texts[salt].tokens, texts[salt].tokens[1:], strict=False)
        followers = {follower for pair in pairs for follower in table.guess(other, *pair)[:1]}
        assert followers <= set(texts[other].tokens)
        assert any(table.guess(salt, *pair) for pair in zip(texts[salt].tokens, texts[salt].tokens[1:], strict=False))
    alone = NgramTable()
    alone.read(texts["a"])
    assert not any(alone.guess("b", first, second) for first in range(200) for second in range(0, 200, 7))


def test_a_full_table_confuses_no_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "TABLE_SIZE", 2)
    table = NgramTable()
    for token in range(1, 40):
        table.add("", token, token + 1, 100 + token)
    for token in range(1, 60):
        assert table.guess("", token, token + 1) in ([], [100 + token])


def test_each_token_is_read_once() -> None:
    table, sequence = NgramTable(), make_sequence([1, 2, 3])
    table.read(sequence)
    table.add("", 1, 2, 9)
    sequence.tokens += [5, 1, 2]
    table.read(sequence)
    assert table.guess("", 1, 2)[0] == 9
    assert table.guess("", 3, 5)[0] == 1
    table.end(sequence)
    assert not table._n_read


def test_the_rate_is_that_of_first_guesses() -> None:
    table = NgramTable()
    for step in range(600):
        table.observe([4, 5], 4 if step % 4 else 5)
        table.observe([], 7)
    assert table.rate == pytest.approx(0.75, abs=0.05)
