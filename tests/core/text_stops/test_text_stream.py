"""Incremental text: the pieces joined are the whole, and a stop string cuts wherever the tokens fall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.text_stops import TextStream
from specdec.core.types import FinishReason, OutputParams, StoppingParams, TextRules
from tests.engine.tiny_engine import tiny_parts


def stream(text: str, stops: tuple[str, ...] = (), include: bool = False) -> tuple[str, str | None]:
    tokenizer = tiny_parts().tokenizer
    out = TextStream(tokenizer, StoppingParams(stop=stops, include_stop=include), OutputParams())
    pieces = []
    for token in tokenizer.encode(text, add_special=False):
        piece = out.push(token)
        pieces.append(piece.text)
        if piece.stop is not None:
            return "".join(pieces), piece.stop
    return "".join([*pieces, out.flush()]), None


@given(st.text(max_size=30))
def test_pieces_join_to_the_text(text: str) -> None:
    assert stream(text) == (text, None)


@given(st.text("abé世", max_size=20), st.text("abé世", min_size=1, max_size=3), st.booleans())
def test_a_stop_cuts_at_its_first_occurrence(text: str, stop: str, include: bool) -> None:
    at = text.find(stop)
    expected = (text, None) if at < 0 else (text[: at + (len(stop) if include else 0)], stop)
    assert stream(text, (stop,), include) == expected


@pytest.mark.parametrize("stops", [("ab", "b"), ("b", "ab")])
def test_the_earliest_of_several_stops_wins(stops: tuple[str, ...]) -> None:
    assert stream("xxab", stops)[0] in ("xx", "xxa")
    assert stream("xxb", stops) == ("xx", "b")


class Letters:
    """A token is a byte."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def ended(text: str, stopping: StoppingParams, limit_at: int | None = None) -> tuple[str, FinishReason | None]:
    """What a stream gives of ``text``, and why it ends. limit_at: where its time limit is reached."""
    out, given = TextStream(Letters(), stopping, OutputParams()), ""  # type: ignore[arg-type]
    for at, byte in enumerate(text.encode()):
        if at == limit_at:
            out.end_at_line()
        piece = out.push(byte)
        given += piece.text
        if piece.reason is not None:
            return given, piece.reason
    return given + out.flush(), None


@pytest.mark.parametrize("least", range(12))
def test_a_rule_that_holds_below_min_tokens_ends_the_text_later(least: int) -> None:
    """Byte n of ten lines of two letters is a line break if n % 3 == 2."""
    lines, after = "ab\n" * 10, least + (2 - least) % 3
    rules = StoppingParams(rules=TextRules(max_lines=1), min_tokens=least)
    assert ended(lines, rules) == (lines[:after], FinishReason.LINES)
    limit = StoppingParams(time_limit_s=1.0, finish_line=True, min_tokens=least)
    assert ended(lines, limit, 1) == (lines[:after], FinishReason.TIME_LIMIT)
    blank = StoppingParams(rules=TextRules(blank_line=True), min_tokens=least)
    assert ended("a" + "\n" * 20 + "b", blank)[1] == FinishReason.BLANK_LINE


@pytest.mark.parametrize("left", [1, 2, 3])
def test_an_incomplete_character_at_the_end_is_no_text(left: int) -> None:
    out = TextStream(Letters(), StoppingParams(stop=("x🎉",)), OutputParams())  # type: ignore[arg-type]
    given = "".join(out.push(byte).text for byte in "ax🎉".encode()[:-left])
    assert given + out.flush() == "ax"
