"""Incremental text: the pieces joined are the whole, and a stop string cuts wherever the tokens fall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.text_stops import TextStream
from specdec.core.types import OutputParams, StoppingParams
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
