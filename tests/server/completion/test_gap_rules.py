"""Stops that follow from the position of the cursor, and documents that edits keep in sync."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.completion.documents import (
    CHARACTERS_BEFORE,
    MAX_CHARACTERS,
    Gap,
    OffsetUnit,
    TextDocument,
    TextEdit,
    place_of,
)
from server.completion.requests import CompletionOptions, gap_rules, open_brackets
from specdec.core.types import Request, StoppingParams, TextRules
from specdec.errors import InvalidRequestError

TEXT = st.text("abé世😀\n()", max_size=40)


@pytest.mark.parametrize(
    ("prefix", "suffix", "closers", "quote"),
    [
        ("f(", "", ")", ""),
        ("f(", ")", "", ""),
        ("f(a[", ")", "]", ""),
        ("f(a[", "\n", "])", ""),
        ("if (x) {\n  f(", ");\n}\n", "", ""),
        ("if (x) {\n  f(", "\n}\n", ")", ""),
        ("if (x) {\n  for (;;) {\n    ", "\n}\n", "}", ""),
        ("function f() {\n  ", "", "}", ""),
        ("print(')' + ", "", ")", ""),
        ("print('hello ", ")", "", "'"),
        ("print('hello ", "')", "", "'"),
        ("x = 1  # (see ", "\n", "", "#"),
        ('"""Reads (', "\n", "", '"""'),
        ("a) b] (", "", ")", ""),
        ("{" + "x\n" * 2000 + "(", "", ")", ""),  # the brace is too far away to be inspected
        ("(", "x\n" * 1000, "", ""),  # its closing bracket may come later
    ],
)
def test_unmatched_brackets_may_be_closed(prefix: str, suffix: str, closers: str, quote: str) -> None:
    assert open_brackets(prefix, suffix) == (closers, quote)


@pytest.mark.parametrize(
    ("gap", "rules"),
    [
        (
            Gap("def f():\n    return g(", ")\n\nx = 1\n"),
            TextRules(min_indent=4, closers="", suffix=")\n\nx = 1\n"),
        ),
        (Gap("def f():\n    ", "\nx"), TextRules(min_indent=4, closers="", suffix="\nx", lead="\n    ")),
        (Gap("def f():\n", "\nx"), TextRules(closers="", suffix="\nx", lead="\n")),
        (Gap("f(\r\n\t", "\r\nx)"), TextRules(min_indent=1, closers="", suffix="\r\nx)", lead="\r\n\t")),
        (Gap("", "x"), TextRules(closers="", suffix="x")),
        (Gap("  ", "x"), TextRules(min_indent=2, closers="", suffix="x")),
        (Gap("\t\tif x", ""), TextRules(min_indent=2, closers="")),
    ],
)
def test_stop_rules_of_a_position(gap: Gap, rules: TextRules) -> None:
    assert gap_rules(gap, CompletionOptions()) == rules


def test_requested_rules_are_kept() -> None:
    requested = TextRules(max_lines=3, min_indent=0, closers="}", suffix="zz")
    options = CompletionOptions(Request("", (), stopping=StoppingParams(rules=requested)))
    assert gap_rules(Gap("    f(", "x"), options) == requested
    off = CompletionOptions(dedent=False, bracket=False, suffix=False)
    assert gap_rules(Gap("    f(", "x"), off) is None
    assert len(gap_rules(Gap("", "x" * 9000), CompletionOptions()).suffix) == 512  # type: ignore[union-attr]


@given(text=TEXT, place=st.integers(0, 40))
def test_offsets_in_every_unit(text: str, place: int) -> None:
    place = min(place, len(text))
    head = text[:place]
    sizes = {
        OffsetUnit.CODE_POINT: place,
        OffsetUnit.UTF16: len(head.encode("utf-16-le")) // 2,
        OffsetUnit.UTF8: len(head.encode()),
    }
    for unit, offset in sizes.items():
        assert place_of(text, offset, unit) == place
        assert place_of(text, -1, unit) is None
        assert place_of(text, 10_000, unit) is None


def test_no_offset_is_inside_a_character() -> None:
    assert place_of("a😀b", 2, OffsetUnit.UTF16) is None
    assert [place_of("a😀b", i, OffsetUnit.UTF8) for i in range(7)] == [0, 1, None, None, None, 2, 3]


def length_in(unit: OffsetUnit, text: str) -> int:
    codecs = {OffsetUnit.UTF16: ("utf-16-le", 2), OffsetUnit.UTF8: ("utf-8", 1)}
    encoding, width = codecs.get(unit, ("utf-32-le", 4))
    return len(text.encode(encoding)) // width


@given(
    text=TEXT,
    edits=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), TEXT), max_size=4),
    unit=st.sampled_from(OffsetUnit),
)
def test_edits_are_applied_in_order_or_not_at_all(
    text: str, edits: list[tuple[int, int, str]], unit: OffsetUnit
) -> None:
    document, expected, ok = TextDocument(text, 1), text, True
    changes = []
    for start, end, new in edits:
        ok = ok and start <= end <= len(expected)
        beyond = 4 * max(0, end - len(expected))  # units, so that it stays beyond
        changes.append(TextEdit(length_in(unit, expected[:start]), length_in(unit, expected[:end]) + beyond, new))
        expected = expected[:start] + new + expected[end:]
    if ok:
        document.apply(changes, 2, unit)
        assert (document.text, document.version) == (expected, 2)
    else:
        with pytest.raises(InvalidRequestError):
            document.apply(changes, 2, unit)
        assert (document.text, document.version) == (text, 1)


@pytest.mark.parametrize(("unit", "inside"), [(OffsetUnit.UTF16, [2]), (OffsetUnit.UTF8, [2, 3, 4])])
def test_an_edit_inside_a_character_is_refused(unit: OffsetUnit, inside: list[int]) -> None:
    for at in inside:
        for start, end in ((at, at), (1, at), (at, at + 4)):
            with pytest.raises(InvalidRequestError, match=r"edits\[1\]: .*between characters"):
                TextDocument("a😀bcdef", 1).apply([TextEdit(0, 0, ""), TextEdit(start, end, "x")], 2, unit)


@pytest.mark.parametrize("unit", OffsetUnit)
def test_thousands_of_edits_of_a_long_document_take_no_time(unit: OffsetUnit) -> None:
    line = "let größe = 1;\n"
    document, length = TextDocument(line * 100_000, 1), length_in(unit, line)
    edits = [TextEdit(i * (20 * length + 2), i * (20 * length + 2) + 3, "const") for i in range(5000)]
    began_s = time.monotonic()
    document.apply(edits, 2, unit)
    assert time.monotonic() - began_s < 3.0  # encoded for each edit: up to 23 seconds
    assert document.text == (line.replace("let", "const") + line * 19) * 5000


def test_documents_do_not_grow_without_bound() -> None:
    document = TextDocument("x" * MAX_CHARACTERS, 1)
    with pytest.raises(InvalidRequestError, match="characters"):
        document.apply([TextEdit(0, 0, "y")], 2, OffsetUnit.UTF8)


def test_the_inspected_part_of_a_long_document_keeps_its_start() -> None:
    document = TextDocument("0123456789" * 40_000, 1)
    starts = set()
    for place in range(200_000, 210_000, 500):
        prefix, suffix = document.around(place)
        assert document.text.startswith(suffix[:100], place)
        assert document.text[:place].endswith(prefix)
        assert len(prefix) >= CHARACTERS_BEFORE
        starts.add(place - len(prefix))
    assert len(starts) <= 2
