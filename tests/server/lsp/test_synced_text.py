"""Documents follow the editor: positions in every encoding, edits, and the text that is sent."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types

from server.completion.documents import OffsetUnit, TextDocument, TextEdit
from server.lsp import documents
from server.lsp.documents import LOGGED, BeyondDocumentError, OpenDocument, SyncedText

PIECES = st.lists(
    st.sampled_from(["a", "é", "€", "😀", "\n", "\r", "\r\n", "\u2028", "\x0c", "\t", "e\u0301"]), max_size=12
).map("".join)

EDITS = st.lists(st.tuples(st.randoms(use_true_random=False), PIECES), max_size=8)


class Spot(NamedTuple):
    """A place in a text, as an editor names it."""

    index: int
    line: int
    units: dict[OffsetUnit, int]


def spots(text: str) -> list[Spot]:
    """Every place that an editor can name, found by walking through the text."""
    found, line, head, i = [], 0, "", 0
    while True:
        ended = i == len(text)
        widths = {
            OffsetUnit.UTF8: len(head.encode()),
            OffsetUnit.UTF16: sum(2 if ord(c) > 0xFFFF else 1 for c in head),
            OffsetUnit.CODE_POINT: len(head),
        }
        found.append(Spot(i, line, widths))
        if ended:
            return found
        if text[i] in "\r\n":
            i += 2 if text[i : i + 2] == "\r\n" else 1
            line, head = line + 1, ""
        else:
            head += text[i]
            i += 1


@given(PIECES, st.sampled_from(OffsetUnit))
def test_every_position_is_found(text: str, encoding: OffsetUnit) -> None:
    synced = SyncedText(text, encoding)
    for spot in spots(text):
        assert synced.place(spot.line, spot.units[encoding]) == spot.index


@given(PIECES, st.sampled_from(OffsetUnit), st.integers(0, 6), st.integers(0, 30))
def test_positions_beyond_a_line_are_its_end(text: str, encoding: OffsetUnit, line: int, units: int) -> None:
    inside = [spot for spot in spots(text) if spot.line == line]
    place = SyncedText(text, encoding).place(line, units)
    if not inside:
        assert place == len(text)
    else:
        # Inside of a character it is that character's begin.
        fitting = bisect_right([spot.units[encoding] for spot in inside], units) - 1
        assert place == inside[fitting].index


@given(
    PIECES,
    st.lists(st.tuples(st.randoms(use_true_random=False), PIECES), max_size=8),
    st.sampled_from(OffsetUnit),
)
def test_edits_apply_in_order(text: str, edits: list[tuple[object, str]], encoding: OffsetUnit) -> None:
    document = OpenDocument("file:///a", "a", "python", text, encoding)
    copy, held = TextDocument(text, document.revision), document.revision
    for random, new in edits:
        a, b = sorted(random.choices(spots(text), k=2))  # type: ignore[attr-defined]
        text = text[: a.index] + new + text[b.index :]
        where = types.Range(
            types.Position(a.line, a.units[encoding]), types.Position(b.line, b.units[encoding])
        )  # fmt: skip
        document.apply([types.TextDocumentContentChangePartial(where, new)])
        assert document.text == text
        if random.random() < 0.5:  # type: ignore[attr-defined]
            held = bring(copy, document, held)
            for spot in spots(text):
                position = types.Position(spot.line, spot.units[encoding])
                assert document.place(position) == spot.index
                assert document.range_of(spot.index, spot.index).start == position
            with pytest.raises(BeyondDocumentError):
                document.completed_at(types.Position(spot.line + 1, 0))
    bring(copy, document, held)


@pytest.mark.parametrize(("new", "second_line"), [("\n", 2), ("\nb", 2), ("b\n", 1)])
def test_a_line_feed_inserted_behind_a_carriage_return_ends_the_same_line(new: str, second_line: int) -> None:
    synced = SyncedText("\ra", OffsetUnit.UTF16)
    synced.replace(1, 1, new)
    assert synced.n_lines == 1 + len(re.findall("\r\n|\n|\r", synced.text))
    assert synced.place(1, 0) == second_line


class Searched:
    """Finds the ends of lines, and counts the characters that it searches."""

    def __init__(self) -> None:
        self.characters, self._pattern = 0, documents._LINE_END

    def finditer(self, text: str, start: int = 0, stop: int = sys.maxsize) -> Iterator[re.Match[str]]:
        self.characters += min(stop, len(text)) - start
        return self._pattern.finditer(text, start, stop)


@pytest.mark.parametrize("descending", [True, False])
def test_changes_of_every_line_search_only_changed_lines_again(
    descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched, lines = Searched(), 200
    monkeypatch.setattr(documents, "_LINE_END", searched)
    document = OpenDocument("file:///a", "a", "python", "old\n" * lines, OffsetUnit.UTF16)
    every = [types.Range(types.Position(i, 0), types.Position(i, 3)) for i in range(lines)]
    if descending:
        every.reverse()
    document.apply([types.TextDocumentContentChangePartial(where, "new and longer") for where in every])
    assert document.text == "new and longer\n" * lines
    assert searched.characters < 4 * len(document.text)


def test_a_look_far_from_a_change_searches_only_changed_lines_again(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = Searched()
    monkeypatch.setattr(documents, "_LINE_END", searched)
    document = OpenDocument("file:///a", "a", "python", "line\n" * 1000, OffsetUnit.UTF16)
    assert document.place(types.Position(990, 1)) == 4951
    searched.characters = 0
    for line in (3, 980):
        at = types.Position(line, 2)
        document.apply([types.TextDocumentContentChangePartial(types.Range(at, at), "x")])
        assert document.range_of(4950, 4960).end.line == 991
        assert document.place(types.Position(2, 1)) == 11
    assert searched.characters < 50


def bring(copy: TextDocument, document: OpenDocument, held: int) -> int:
    """Apply to the server's copy what it would receive."""
    edits = document.edits_since(held)
    if edits is None:
        copy.text = document.text
    else:
        copy.apply([TextEdit(e.start, e.end, e.text) for e in edits], document.revision, OffsetUnit.CODE_POINT)
    assert copy.text == document.text
    return document.revision


def test_many_edits_are_sent_as_a_text() -> None:
    document = OpenDocument("file:///a", "a", "python", "x" * 1000, OffsetUnit.UTF16)
    start, first = types.Position(0, 0), document.revision
    document.apply([types.TextDocumentContentChangePartial(types.Range(start, start), "y")])
    second = document.revision
    for _ in range(LOGGED):
        document.apply([types.TextDocumentContentChangePartial(types.Range(start, start), "y")])
    assert document.edits_since(first) is None
    found = document.edits_since(second)
    assert found is not None
    assert len(found) == LOGGED
    assert document.edits_since(document.revision) == ()
    document.apply([types.TextDocumentContentChangeWholeDocument("z")])
    assert document.edits_since(second) is None


def test_half_a_surrogate_pair_counts_as_one() -> None:
    document = OpenDocument("file:///a", "a", "python", "a\ud83db", OffsetUnit.UTF16)
    assert document.text == "a\ufffdb"
    end = types.Position(0, 3)
    document.apply([types.TextDocumentContentChangePartial(types.Range(end, end), "\udc00")])
    found = document.edits_since(document.revision - 1)
    assert found is not None
    assert (document.text, [e.text for e in found]) == ("a\ufffdb\ufffd", ["\ufffd"])


@pytest.mark.parametrize(("touched", "shown"), [(0, "0\n1\n2\n3\n4\n"), (40, "15\n16\n17\n"), (10**6, "27\n28\n29\n")])
def test_an_excerpt_consists_of_whole_lines(touched: int, shown: str) -> None:
    text = "".join(f"{i}\n" for i in range(30))
    document = OpenDocument("file:///a", "a", "python", text, OffsetUnit.UTF16)
    document.touched = touched
    assert document.excerpt(10) == shown
    assert document.excerpt(10**6) == text


def test_a_whole_text_moves_the_touched_place_into_it() -> None:
    document = OpenDocument("file:///a", "a", "python", "x" * 100, OffsetUnit.UTF16)
    document.completed_at(types.Position(0, 80))
    document.apply([types.TextDocumentContentChangeWholeDocument("y" * 90)])
    assert document.touched == 80
    document.apply([types.TextDocumentContentChangeWholeDocument("z" * 40)])
    assert document.touched == 40
