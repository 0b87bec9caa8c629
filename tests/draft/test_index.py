"""What the index drafter proposes, from which index, and when an index is reloaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.index import IndexDrafter, IndexShelf
from specdec.control.inputs import Match
from specdec.core.fields import MAX_INDEXES
from specdec.core.types import SpeculationParams
from specdec.errors import ConfigError
from tests.draft.helpers import code_like, make_sequence, propose, replay
from tests.draft.native_lookups import lookups
from tests.draft.test_token_index import write


def shelf(folder: Path, **files: list[int]) -> IndexShelf:
    return IndexShelf({name: write(folder / name, [tokens], 1000) for name, tokens in files.items()}, "f")


def drafted(shelf: IndexShelf, prompt: list[int], names: tuple[str, ...] | None = None) -> list[int]:
    """The tokens of a tree of at most three draft nodes."""
    drafter = IndexDrafter(lookups(), shelf)
    sequence = make_sequence(prompt, speculation=SpeculationParams(indexes=names))
    drafter.begin(sequence)
    tree = propose(drafter, sequence, nodes=3)
    drafter.end(sequence)
    return tree.tokens[1:]


def test_drafts_continue_the_indexed_text(tmp_path: Path) -> None:
    assert drafted(shelf(tmp_path, a=[1, 2, 3, 4, 5, 6, 7]), [9, 9, 2, 3]) == [4, 5, 6]


def test_a_step_searches_a_bounded_number_of_indexes(tmp_path: Path) -> None:
    many = shelf(tmp_path, **{f"i{n}": [1, 2, 3] for n in range(MAX_INDEXES + 1)})
    assert [index.path.name for index in many.get(None)] == [f"i{n}" for n in range(MAX_INDEXES)]


def test_a_request_chooses_indexes_by_name(tmp_path: Path) -> None:
    both = shelf(tmp_path, a=[1, 2, 3, 4], b=[1, 2, 3, 5])
    assert drafted(both, [1, 2, 3], ("a",)) == [4]
    assert drafted(both, [1, 2, 3], ("b", "unknown", "b")) == [5]
    assert sorted(drafted(both, [1, 2, 3])) == [4, 5]
    asks_none = make_sequence([1, 2, 3], speculation=SpeculationParams(indexes=()))
    assert not IndexDrafter(lookups(), both).serves(asks_none)


def test_tokens_beyond_the_vocabulary_are_unknown(tmp_path: Path) -> None:
    of = shelf(tmp_path, a=[1, 2, 3])
    assert drafted(of, [1, 2]) == [3]
    for prompt in ([1, 1000], [1000], [2**30, 2], [4]):
        assert drafted(of, prompt) == []


def test_a_longer_match_counts_more_than_more_texts(tmp_path: Path) -> None:
    text = [1, 2, 3, 4, 5, 50, *[9, 4, 5, 60] * 20]
    assert drafted(shelf(tmp_path, a=text), [1, 2, 3, 4, 5])[0] == 50


def test_a_match_grows_with_the_answer(tmp_path: Path) -> None:
    drafter = IndexDrafter(lookups(), shelf(tmp_path, a=[1, 2, 3, 4, 5, 50, *[9, 3, 4, 5, 60] * 20]))
    sequence = make_sequence([1, 2])
    drafter.begin(sequence)
    for token in (3, 4, 5):
        assert propose(drafter, sequence, nodes=3).tokens[1] == token
        sequence.tokens.append(token)
    assert propose(drafter, sequence, nodes=3).tokens[1] == 50


@pytest.mark.parametrize(("prompt", "match"), [([7], Match.NONE), ([7, 2], Match.WEAK), ([1, 2], Match.STRONG)])
def test_a_match_says_how_much_text_a_proposal_follows(prompt: list[int], match: Match, tmp_path: Path) -> None:
    drafter, sequence = IndexDrafter(lookups(), shelf(tmp_path, a=[1, 2, 3], b=[9, 2, 5])), make_sequence(prompt)
    drafter.begin(sequence)
    assert drafter.match([sequence]) == [match]


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 4), st.integers(0, 5))
def test_tree_limits_are_obeyed(
    tmp_path_factory: pytest.TempPathFactory, nodes: int, depth: int, width: int, seed: int
) -> None:
    drafter = IndexDrafter(lookups(), shelf(tmp_path_factory.mktemp("i"), a=code_like(400, 1)))
    sequence = make_sequence(code_like(60, seed))
    drafter.begin(sequence)
    propose(drafter, sequence, nodes, depth, width)


def test_an_indexed_text_is_drafted(tmp_path: Path) -> None:
    text = code_like(600, 1)
    drafter = IndexDrafter(lookups(), shelf(tmp_path, a=text))
    assert replay(drafter, make_sequence(text[:50]), text[50:300]) > 4


def test_a_renewed_index_is_used_from_the_next_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    indexes = shelf(tmp_path, a=[1, 2, 3, 4])
    path = tmp_path / "a"
    write(path, [[1, 2, 3, 7, 7]], 1000)
    assert drafted(indexes, [1, 2, 3])[0] == 7
    (tmp_path / "broken").write_bytes(b"broken")
    os.replace(tmp_path / "broken", path)
    assert drafted(indexes, [1, 2, 3])[0] == 7  # a mapped index stays in use
    drafted(indexes, [1, 2, 3])
    assert caplog.text.count("is no index") == 1
    os.unlink(path)
    assert drafted(indexes, [1, 2, 3])[0] == 7
    write(path, [[1, 2, 3, 8]], 1000)
    assert drafted(indexes, [1, 2, 3])[0] == 8


def test_an_index_of_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [[1, 2]])
    with pytest.raises(ConfigError, match=r"engine\.indexes\.mine: .*another model.*index PATH\.\.\. .*--target MODEL"):
        IndexShelf({"mine": path}, "other")
