"""Text rules: each against a simple implementation on the whole text, and all of them under any split."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.text_stops import TextCutter
from specdec.core.types import FinishReason, TextRules

CODE = st.text(st.sampled_from(list("ab()[]{}\n\n   \t\"'#\\;</>")), max_size=60)
RULES = st.builds(
    TextRules,
    max_lines=st.none() | st.integers(1, 3),
    min_indent=st.none() | st.integers(0, 4),
    blank_line=st.booleans(),
    closers=st.none() | st.text(")]}", max_size=2),
    quote=st.sampled_from(["", "'", '"', '"""', "#"]),
    suffix=st.text("ab)};\n ", max_size=12) | st.sampled_from(["'a\n", '"', '""" + b', "</b>a", "</>"]),
    lead=st.sampled_from(["", "\n", "\n  "]),
)


def cut(rules: TextRules, *pieces: str) -> tuple[str, FinishReason | None]:
    """The text as a reader gets it, and the rule that ended it."""
    cutter, text, shown = TextCutter(rules), "", 0
    for piece in pieces:
        text += piece
        found = cutter.feed(piece)
        if found is not None:
            assert found.place >= shown  # nothing that was given out is taken back
            return text[: found.place], found.reason
        assert shown <= cutter.safe <= len(text)
        shown = cutter.safe
    found = cutter.end()
    assert found is None or found.place >= shown
    return (text, None) if found is None else (text[: found.place], None)


@given(rules=RULES, text=CODE, data=st.data())
def test_splitting_changes_nothing(rules: TextRules, text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert cut(rules, *pieces) == cut(rules, text)


@given(rules=RULES, text=CODE)
def test_the_remaining_text_is_a_prefix_that_no_rule_cuts(rules: TextRules, text: str) -> None:
    rules = dataclasses.replace(rules, suffix="")  # text before a suffix may end like the suffix again
    left, _ = cut(rules, text)
    assert text.startswith(left)
    assert cut(rules, left) == (left, None)


@given(rules=RULES, text=CODE)
def test_two_character_line_breaks_change_nothing(rules: TextRules, text: str) -> None:
    rules = dataclasses.replace(rules, suffix="", lead="")
    left, reason = cut(rules, text)
    assert cut(rules, text.replace("\n", "\r\n")) == (left.replace("\n", "\r\n"), reason)


@given(text=CODE, lines=st.integers(1, 4))
def test_lines_are_counted(text: str, lines: int) -> None:
    parts = text.split("\n")
    keep = lines + (not parts[0].strip())
    ended = len(parts) > keep
    assert cut(TextRules(max_lines=lines), text) == (
        "\n".join(parts[:keep]), FinishReason.LINES if ended else None
    )  # fmt: skip


@given(text=CODE, indent=st.integers(0, 4))
def test_a_less_indented_line_ends_the_block(text: str, indent: int) -> None:
    lines = text.split("\n")
    for i, line in enumerate(lines[1:], 1):
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            expected = "\n".join(lines[:1] + lines[1:i])
            while "\n" in expected and not expected.rsplit("\n", 1)[1].strip():
                expected = expected.rsplit("\n", 1)[0]
            assert cut(TextRules(min_indent=indent), text) == (expected, FinishReason.INDENT)
            return
    assert cut(TextRules(min_indent=indent), text) == (text, None)


@given(text=CODE)
def test_a_blank_line_ends_the_text(text: str) -> None:
    found = re.search(r"\n[ \t]*\n", text)
    if found is None:
        assert cut(TextRules(blank_line=True), text) == (text, None)
    else:
        assert cut(TextRules(blank_line=True), text) == (text[: found.start()], FinishReason.BLANK_LINE)


@given(text=st.text("ab()[]{} ", max_size=40))
def test_only_brackets_opened_in_the_text_are_closed(text: str) -> None:
    pairs, stack, expected = {")": "(", "]": "[", "}": "{"}, list[str](), text
    for i, char in enumerate(text):
        if char in "([{":
            stack.append(char)
        elif char in pairs:
            if pairs[char] not in stack:
                expected = text[:i]
                break
            while stack.pop() != pairs[char]:
                pass
    reason = FinishReason.BRACKET if expected != text else None
    assert cut(TextRules(closers=""), text) == (expected, reason)


@pytest.mark.parametrize(
    ("rules", "text", "left"),
    [
        (TextRules(closers=""), "x)", "x"),
        (TextRules(closers=""), "f(x)", "f(x)"),
        (TextRules(closers=""), 'a.split(")"))', 'a.split(")")'),
        (TextRules(closers=""), "x  # 1) the first\ny)", "x  # 1) the first\ny"),
        (TextRules(closers=""), "x // a)\n)", "x // a)"),
        (TextRules(closers=""), '"""a) b) "c" """)', '"""a) b) "c" """'),
        (TextRules(closers="", quote='"'), ' :)" + x)', ' :)" + x'),
        (TextRules(closers="", quote='"""'), " a)\n b) ''' \"\"\")", " a)\n b) ''' \"\"\""),
        (TextRules(closers=""), "fn f<'a>(x: &'a str) {", "fn f<'a>(x: &'a str) {"),
        (TextRules(closers=""), "don't (care)", "don't (care)"),
        (TextRules(closers=")"), "x))", "x)"),
        (TextRules(closers=")}"), "x)\n}\n}", "x)\n}"),
        (TextRules(closers="}"), "x)", "x"),
        (TextRules(closers=""), "x\n  )", "x"),
        (TextRules(closers=""), r"'\')' + a]", r"'\')' + a"),
    ],
)
def test_brackets_of_real_code(rules: TextRules, text: str, left: str) -> None:
    assert cut(rules, text) == (left, None if left == text else FinishReason.BRACKET)


@pytest.mark.parametrize(
    ("suffix", "text", "left"),
    [
        ("\n    return total\n", "x += 1\n    return total\n", "x += 1"),
        ("\n    return total\n", "x += 1\n    return totals\n", "x += 1\n    return totals\n"),
        ("\n    return total\n", "x += 1\n    return tot", "x += 1"),  # the end falls inside it
        ("\n    return total\n", "x += 1\n    re", "x += 1\n    re"),  # too little text to decide
        (")\n", "x)\n", "x"),
        (")\n", "x)", "x"),
        (")\n", "f(x)\n", "f(x)\n"),
        (");\n", "f(x)", "f(x)"),
        (");\n", "f(x);\n", "f(x);\n"),  # its own bracket: no repetition
        (";\n", "() => {\n  b();\n}", "() => {\n  b();\n}"),
        (";\n", "a;\nb", "a"),
        ('"\n', 'hello"\n', "hello"),
        ("\n}", "if (a) {\n  b\n}\nc\n}", "if (a) {\n  b\n}\nc"),
        ("\n\n", "a\n\nb", "a\n\nb"),
        ("\n\n\ndef sizes(folder):\n", "\n\ndef sizes(folder):\n    return", ""),  # blank lines do not count
        ("\n\ndef sizes(folder):\n", "x = 1\n\n\n\ndef sizes(folder):\n", "x = 1"),
        ("def sizes(folder):\n", "import os\n\n\ndef sizes(folder):", "import os\n\n\n"),
        ("}", "a;\n\n}", "a;\n\n"),
        ("\na = 1\n\nb = 2\n", "x = 1\na = 1\nb = 2", "x = 1"),
        ("\n\ndef sizes(folder):\n", "\n\n\n    def sizes(folder):\n", "\n\n\n    def sizes(folder):\n"),
        (" + b\n", "a + b", "a + b"),  # three visible characters may be chance
        ("\nabcabcabd\n", "abcabcabc\nabcabcabcabd\nabcabcabd\n", "abcabcabc\nabcabcabcabd"),
    ],
)
def test_text_that_repeats_the_suffix_is_cut(suffix: str, text: str, left: str) -> None:
    assert cut(TextRules(suffix=suffix), text)[0] == left


def test_white_space_before_a_repetition_is_cut_with_it() -> None:
    rules = TextRules(suffix="\n    return total\n", lead="\n    ")
    assert cut(rules, "return total\n") == ("", FinishReason.SUFFIX)
    assert cut(TextRules(suffix=rules.suffix), "return total\n") == ("return total\n", None)


@given(text=st.text("ab\n ", max_size=40), suffix=st.text("ab\n ", min_size=1, max_size=20))
def test_the_suffix_is_found_at_its_first_occurrence(text: str, suffix: str) -> None:
    if not suffix.strip() or suffix.split("\n", maxsplit=1)[0].strip():
        return  # the rule of the cursor's line is another
    lines, anchor = re.sub("\n+", "\n", suffix).splitlines(keepends=True), ""
    while lines and len("".join(anchor.split())) < 6:
        anchor += lines.pop(0)
    found = re.search(anchor.replace("\n", "\n+"), text)
    if found is not None:
        assert cut(TextRules(suffix=suffix), text) == (text[: found.start()], FinishReason.SUFFIX)
    else:
        left, reason = cut(TextRules(suffix=suffix), text)
        assert reason is None
        rest = re.sub("\n+", "\n", text[len(left) :])
        assert anchor.startswith(rest)
        assert not rest or len("".join(rest.split())) >= 6


def test_of_simultaneous_rules_the_one_that_cuts_most_wins() -> None:
    rules = TextRules(max_lines=1, suffix=")\n")
    assert cut(rules, "x)\n") == ("x", FinishReason.SUFFIX)
    assert cut(TextRules(max_lines=1), "x)\n") == ("x)", FinishReason.LINES)


@pytest.mark.parametrize(
    ("suffix", "text", "left"),
    [('")\n', 'world")\n', "world"), ('}")\n', 'name}")\n', "name"), ('")\n', "world)", "world)")],
)
def test_a_bracket_that_ends_a_text_is_cut_with_the_repetition_that_it_ends(suffix: str, text: str, left: str) -> None:
    assert cut(TextRules(closers="", quote='"', suffix=suffix), text)[0] == left


@pytest.mark.parametrize(
    ("suffix", "text", "left"),
    [
        ("}\n", "\n  return a;\n}\n\nb", "\n  return a;\n"),
        (" }", " return a; }", " return a;"),
        (")\n", "\r\n    a,\r\n)", "\r\n    a,\r\n"),
        ("\n}\n", "return a;\n}\n", "return a;"),
        (")", "a\n]", "a"),  # another bracket
    ],
)
def test_a_bracket_on_a_line_of_its_own_stays_there(suffix: str, text: str, left: str) -> None:
    assert cut(TextRules(closers="", suffix=suffix), text)[0] == left


@pytest.mark.parametrize(
    ("suffix", "text", "left"),
    [
        ("'] = 5\n", "me'", "me"),
        ("'] = 5\n", "me'] = ", "me"),
        ("', y)\n", "a', 'b", "a', 'b"),  # another string
        ("')\n", "don\\'", "don\\'"),
        ("')\n", "a\\\\'", "a\\\\"),
        (", y)\n", "a'", "a'"),  # the text has to close the string
    ],
)
def test_a_mark_that_closes_the_string_again_is_cut(suffix: str, text: str, left: str) -> None:
    assert cut(TextRules(closers="", quote="'", suffix=suffix), text)[0] == left


@pytest.mark.parametrize(
    ("quote", "suffix", "text", "left"),
    [
        ('"', '">Home</a>\n', 'about.html">About</a>\n<a href="', "about.html"),
        ('"', '">Home</a>\n', 'about.html" class="nav', 'about.html" class="nav'),
        ('"', '" onClick={() => go()} />\n', 'foo" />', "foo"),
        ('"', '"; }\n', 'Arial", sans-serif; ', "Arial"),
        ('"', '", "b"]\n', 'it\'s", \'a", "c', "it's"),  # other marks are no end
        ("`", "`);\n", "a\nb` + c\nd", "a\nb"),
        ("'", "';\n", "John\nJane", "John"),  # the string ends with its line
        ('"""', '"""\n', 'Sum.""" + x', "Sum."),
        ('"', '" alt="x">\n', 'x" alt="x">\n', "x"),  # strings of the repetition
        ("#", "# b\n", "a\nb", "a\nb"),
    ],
)
def test_text_ends_in_the_string_that_the_suffix_closes(quote: str, suffix: str, text: str, left: str) -> None:
    assert cut(TextRules(closers="", quote=quote, suffix=suffix), text)[0] == left


def test_lines_that_end_in_a_backslash_are_repeated_like_others() -> None:
    rules = TextRules(closers="", suffix="\n  --name foo \\\n  image\n")
    assert cut(rules, " -it \\\n  --name foo \\\n  image")[0] == " -it \\"


@pytest.mark.parametrize(
    ("suffix", "text", "left"),
    [
        ("</p>\n</div>\n", "Shop</p>\n</body>\n</html>\n", "Shop"),
        ("</li>\n", "One</li>\n<li>Two</li>", "One"),
        ("</li>\n", "A<ul>\n<li>B</li>\n</ul>", "A<ul>\n<li>B</li>\n</ul>"),  # its own tag
        ("</div>\n", '\n<div class="a">b</div>\n', '\n<div class="a">b</div>\n'),
        ("</p>\n", "<pre>a</pre>b<br/></p>", "<pre>a</pre>b<br/>"),  # other tags
        ("</></div>\n", "a<>b</></>", "a<>b</>"),
        ("</p>\n", "a < b</", "a < b"),
        ("</View>\n", "<View a={1} /></View>\n", "<View a={1} />"),
    ],
)
def test_a_closing_tag_that_follows_is_not_repeated(suffix: str, text: str, left: str) -> None:
    assert cut(TextRules(closers="", suffix=suffix), text)[0] == left


def test_what_turns_out_to_be_no_repetition_is_shown_at_once() -> None:
    cutter = TextCutter(TextRules(closers="", suffix=")\n"))
    assert cutter.feed("foo(x") is None
    assert cutter.feed(")") is None  # it closes the text's own bracket
    assert cutter.feed("\n") is None
    assert cutter.safe == len("foo(x)")  # a line break may be the text's last
    assert cutter.feed("y") is None
    assert cutter.safe == len("foo(x)\ny")


def test_text_that_no_rule_cuts_is_kept() -> None:
    cutter = TextCutter(TextRules(max_lines=1, closers="", min_indent=4, blank_line=True))
    assert cutter.feed("a)\n\n", binding=False) is None
    assert cutter.safe == 4
    found = cutter.feed("b")  # less indented than the block, and starts after the certain text
    assert found is not None
    assert found.place == 4


def test_the_time_limit_ends_the_text_at_the_next_line_break() -> None:
    cutter = TextCutter(None)
    assert cutter.feed("a\nb") is None
    cutter.end_at_line()
    found = cutter.feed("c\nd")
    assert found is not None
    assert (found.place, found.reason) == (4, FinishReason.TIME_LIMIT)
