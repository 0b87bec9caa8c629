"""Next edits: the prompts, the edits found in answers, and the calls that return them."""

from __future__ import annotations

import tracemalloc
import unicodedata
from itertools import pairwise
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest
from hypothesis import given
from hypothesis import strategies as st

from server.completion.documents import ContextFile, OffsetUnit, TextEdit
from server.completion.next_edit import (
    PROBLEM_CHARACTERS,
    PROBLEMS,
    RECENT_CHARACTERS,
    RECENT_EDITS,
    RECENT_LINES,
    EditPlace,
    EditPrompt,
    EditReader,
    RecentEdit,
)
from server.completion.prompt_packer import PromptPacker
from server.completion.time_budget import Objective
from server.grpc.completion_messages import read_place
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2, result_pb2
from specdec.core.types import Finished, FinishReason, Request, SpeculationStats, StoppingParams, Timings, Usage
from specdec.errors import ViolationCollector
from specdec.models.next_edit import FORMS, expected_answer
from tests.fake_engine import BOOK
from tests.server.completion.code_tokenizer import QWEN, CodeTokenizer
from tests.server.completion.editor import failed, running
from tests.server.harness import rich

FILE = "import math\n\n\ndef area(w, h):\n    return w * h\n\n\nprint(f(1, 2))\nprint(f(3, 4))\nend = True\n"
RENAMED = RecentEdit("a.py", "def f(w, h):\n", "def area(w, h):\n")
PLACE = EditPlace("a.py", FILE, FILE.index("return"), (RENAMED,))


def prompt_of(place: EditPlace = PLACE, model: str = "m", tokenizer: CodeTokenizer | None = None) -> EditPrompt:
    tokens: Any = tokenizer or CodeTokenizer()
    return EditPrompt(place, model, tokens, PromptPacker(tokens, 4096))


def edits_of(answer: str, place: EditPlace = PLACE, *, complete: bool = True, model: str = "m") -> list[TextEdit]:
    """The edits of an answer that comes in pieces of three characters."""
    reader = EditReader(prompt_of(place, model))
    pieces = [answer[i : i + 3] for i in range(0, len(answer), 3)]
    return [edit for piece in pieces for edit in reader.feed(piece)] + reader.end(complete=complete)


def applied(text: str, edits: list[TextEdit]) -> str:
    for edit in reversed(edits):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


@pytest.mark.parametrize(
    ("model", "special", "form"),
    [
        ("qwen2.5-coder-1.5b", QWEN, "sweep"),
        ("smollm2-135m", (), "plain"),
        ("sweepai/sweep-next-edit-1.5b", QWEN, "sweep"),
        ("zed-industries/zeta", QWEN, "zeta"),
        ("zed-industries/zeta-2", (), "zeta-2"),
        ("zeta-2.1.Q8_0.gguf", (), "zeta-2.1"),
        ("continuedev/instinct", QWEN, "instinct"),
    ],
)
def test_the_prompt_has_the_models_format_and_predicts_the_window(
    model: str, special: tuple[str, ...], form: str
) -> None:
    tokenizer = CodeTokenizer(special)
    request = prompt_of(model=model, tokenizer=tokenizer).request(Request("r", ()))
    prompt = tokenizer.decode(request.prompt_ids, skip_special=False)
    assert next(each for each in FORMS if each.name == form).cue in prompt
    assert expected_answer(prompt)
    assert FILE.removesuffix("\n") in tokenizer.decode(request.prediction_ids)
    assert "def f(w, h):" in tokenizer.decode(request.prompt_ids)
    assert request.stopping.max_tokens == len(request.prediction_ids) + 128


LONG = "".join(f"line_{i} = {i}\n" for i in range(40))


@pytest.mark.parametrize(
    ("text", "tail"),
    [
        (LONG, "\nline_24 = 24\nline_25 = 25\n"),
        (LONG.replace("line_25 = 25", "\n#"), "\nline_23 = 23\nline_24 = 24\n\n"),
        (LONG.replace("line_10 = 10\nline_11 = 11", "line_24 = 24\nline_25 = 25"), ""),
        ("\n" * 40, ""),
    ],
    ids=["lines", "lines without a word", "lines that the window has elsewhere", "no lines with a word"],
)
def test_the_windows_last_lines_end_the_answer(text: str, tail: str) -> None:
    place = EditPlace("a.py", text, len("".join(text.splitlines(keepends=True)[:15])))
    prompt = prompt_of(place)
    request = prompt.request(Request("r", (), stopping=StoppingParams(stop=("mine",))))
    assert request.stopping.stop == ("mine", "<|file_sep|>", *filter(None, (tail,)))
    if not tail:
        return
    shown = place.shown(place.window)
    changed = shown.replace("line_23 = 23\n", "line_23 = 'new'\n") if "line_23" not in tail else "a = 1\n" + shown
    reader, event = (
        EditReader(prompt),
        Finished("r", 0, FinishReason.STOP_STRING, tail, Usage(), SpeculationStats(), Timings()),
    )
    edits = [*reader.feed(changed.partition(tail)[0]), *reader.take(event)]
    assert applied(text, edits) == text.replace(shown, changed)


def test_the_windows_last_lines_come_once_where_the_caller_includes_stop_texts() -> None:
    prompt = prompt_of()
    request = prompt.request(Request("r", (), stopping=StoppingParams(include_stop=True)))
    assert prompt.tail in request.stopping.stop
    assert not request.stopping.include_stop  # `EditReader` adds them


def test_context_over_the_budget_is_omitted_and_special_tokens_stay_text() -> None:
    files = (ContextFile("b.py", "x = 1\n", 1.0), ContextFile("c.py", "y = 2\n" * 1000))
    recent = (RecentEdit("b.py", "x" * 500, "y" * 500), RENAMED)
    tokenizer = CodeTokenizer()
    place = EditPlace("a.py", FILE + "s = '<|file_sep|>'\n", 3, recent, files, ((4, "unused name"),))

    def prompt(budget: int) -> str:
        ids = prompt_of(place, tokenizer=tokenizer).request(Request("r", ()), "", budget).prompt_ids
        assert len(ids) <= budget
        return tokenizer.decode(ids, skip_special=False)

    whole = prompt(2048)
    assert "<|file_sep|>b.py\nx = 1\n<|file_sep|>" in whole
    assert whole.count("y = 2\n") < 1000
    assert "line 5: unused name" in whole
    assert whole.endswith("<|file_sep|>updated/a.py\n")
    assert tokenizer.encode(whole, parse_special=True).count(tokenizer.names["<|file_sep|>"]) > whole.count(
        "\n<|file_sep|>"
    )
    small = prompt(800)
    assert "xxx" not in small
    assert "def f(w, h):" in small


@pytest.mark.parametrize("model", ["m", "zeta", "zeta-2"])
def test_a_prompt_is_bounded_whatever_is_sent(model: str) -> None:
    tokenizer = CodeTokenizer()
    long = "x" * 100_000 + "\n"
    place = EditPlace(
        "a.py", long * 12 + FILE + long, 12 * len(long) + 3, (RENAMED,) * 5000, (ContextFile("b.py", long * 9),),
        ((1, long),) * 5000,
    )  # fmt: skip
    ids = prompt_of(place, model, tokenizer).request(Request("r", ())).prompt_ids
    assert len(ids) < 3 * RECENT_CHARACTERS + 2 * PROBLEMS * PROBLEM_CHARACTERS
    violations = ViolationCollector()
    EditPlace.at(long, 7, OffsetUnit.UTF8, violations, path="p" * 2000)
    assert [found.field for found in violations.found] == ["path", "cursor"]


def test_an_edit_is_complete_before_the_answer_is() -> None:
    reader = EditReader(prompt_of())
    assert reader.feed("import cmath\n\n\n") == []
    assert reader.feed("def area(w, h):\n    return w * h\n") == [TextEdit(7, 7, "c")]
    assert reader.feed("\n\nprint(area(1, 2))\nprint(area(3, 4))\nend = True\n") == []
    at, then = FILE.index("f(1"), FILE.index("f(3")
    assert reader.end(complete=True) == [TextEdit(at, then + 1, "area(1, 2))\nprint(area")]


@pytest.mark.parametrize(
    "answer",
    [
        FILE,
        FILE.removesuffix("\n"),
        "",
        "NO_EDITS\n",
        FILE.replace("area", "f", 1),
        f"```py\n{FILE}```",
        FILE + "\n" + FILE[:20],
        "\n",
        "```py\n```\nNothing follows.\n",
    ],
    ids=[
        "unchanged", "no last line break", "nothing", "NO_EDITS", "takes the last edit back", "fenced", "goes on",
        "blank", "fenced nothing",
    ],
)  # fmt: skip
def test_an_answer_may_contain_no_edit(answer: str) -> None:
    complete = not answer.endswith("\n" + FILE[:20])
    assert edits_of(answer, complete=complete) == []


def test_a_fenced_answer_ends_at_its_second_fence() -> None:
    answer = f"```py\n{FILE.replace('True', 'False')}```\nI changed the last line"
    for complete in (True, False):
        assert applied(FILE, edits_of(answer, complete=complete)) == FILE.replace("True", "False")
    head = "<|editable_region_start|>\n"
    assert applied(FILE, edits_of(head + answer, model="zeta")) == FILE.replace("True", "False")


@pytest.mark.parametrize("added", ["end = False", "```sh\nend\n```"], ids=["no fences", "a block"])
def test_a_last_fence_without_an_opening_one_is_not_part_of_the_file(added: str) -> None:
    changed = FILE.replace("end = True", added)
    for rest in ("", "```", "```\n"):
        assert applied(FILE, edits_of(changed + rest)) == changed


def test_a_window_may_begin_with_a_blank_line() -> None:
    text, changed = "\n" + FILE, "\n" + FILE.replace("True", "False")
    for head in ("", "<|editable_region_start|>\n"):
        assert applied(text, edits_of(head + changed, EditPlace("a.py", text, 0), model="zeta")) == changed


def test_lines_after_the_window_are_not_repeated_into_it() -> None:
    lines = [f"line {i}\n" for i in range(40)]
    place = EditPlace("a.txt", "".join(lines), 0)
    assert edits_of("".join(lines[:14]), place) == []
    assert edits_of("".join(["line zero\n", *lines[1:13]]), place) == [TextEdit(5, 6, "zero")]


def test_a_truncated_answer_deletes_nothing() -> None:
    assert edits_of("import cmath\n\n\ndef area(w, h):\n    return w * h\n", complete=False) == [TextEdit(7, 7, "c")]
    assert edits_of("import cmath\n\n\ndef ar", complete=False) == []


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("zeta", "<|editable_region_start|>\n", ""),
        ("zeta-2.1", "<|marker_1|>", ""),
        ("zeta-2", "", ""),
    ],
)
def test_markers_of_the_format_are_not_text(model: str, before: str, after: str) -> None:
    answer = (
        before + FILE.replace("(3", "<|user_cursor|>(5" if model != "zeta" else "<|user_cursor_is_here|>(5") + after
    )
    assert edits_of(answer, model=model) == [TextEdit(FILE.index("3, 4"), FILE.index("3, 4") + 1, "5")]


@pytest.mark.parametrize(("unit", "extra"), [(OffsetUnit.UTF16, 1), (OffsetUnit.UTF8, 3), (OffsetUnit.CODE_POINT, 0)])
def test_offsets_use_the_callers_unit_and_line_breaks_the_files(unit: OffsetUnit, extra: int) -> None:
    text = "s = '\U0001f600'\r\nx = 1\r\n"
    place = EditPlace("a.py", text, 0, unit=unit)
    at = text.index("1") + extra
    assert edits_of("s = '\U0001f600'\nx = 2\ny = 3\n", place) == [TextEdit(at, at + 1, "2\r\ny = 3")]


@pytest.mark.parametrize(("other", "end"), [("\r\n", "\n"), ("\n", "\r\n")])
def test_bug_an_edit_changed_the_end_of_a_line_in_a_file_with_both(other: str, end: str) -> None:
    lines = [f"line {i}" for i in range(6)]
    text = lines[0] + other + end.join(lines[1:])
    place = EditPlace("a.py", text, 0)
    answer = "line 0\nline 1\nline 2\nsecond\nline 3\nlast 4\nline 5\nend"
    changed = ["line 1", "line 2", "second", "line 3", "last 4", "line 5", "end"]
    assert applied(text, edits_of(answer, place)) == lines[0] + other + end.join(changed)


def test_bug_a_line_of_combining_characters_was_changed_to_the_form_that_the_tokenizer_shows() -> None:
    text = "a = 'cafe\u0301'\nb = 1\n"
    place = EditPlace("a.py", text, 0)
    shown = unicodedata.normalize("NFC", text)
    assert edits_of(shown, place) == []
    assert applied(text, edits_of(shown.replace("1", "2"), place)) == text.replace("1", "2")


def test_diffs_are_parsed_as_edits() -> None:
    diff = "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n-def f(w, h):\n+def area(w, h):\n     return w * h\n"
    edit = RecentEdit.of("a.py", "", "", diff)
    assert (edit.before, edit.after) == tuple(f"def {name}(w, h):\n    return w * h\n" for name in ("f", "area"))
    assert edits_of(FILE.replace("area", "f", 1), EditPlace("a.py", FILE, 0, (edit,))) == []


def test_the_changed_lines_of_two_whole_files_are_the_edit() -> None:
    lines = [f"line {i}\n" for i in range(100_000)]
    edit = RecentEdit.of("a.py", "".join(lines), "".join([*lines[:50], "new\n", *lines[51:]]))
    assert edit.after.splitlines() == ["line 47", "line 48", "line 49", "new", "line 51", "line 52", "line 53"]
    assert RecentEdit.of("a.py", "f(", "f(x") == RecentEdit("a.py", "f(", "f(x")
    comment = RecentEdit.of("a.sql", "", "", "--- a/a.sql\n+++ b/a.sql\n@@ -1 +1 @@\n--- old\n+-- new\n")
    assert (comment.before, comment.after) == ("-- old\n", "-- new\n")


LINES = st.lists(st.sampled_from(["a", "b", "ab", "", "a\r"]), max_size=14)


@given(LINES, LINES, LINES, LINES, st.sampled_from(["", "\n"]))
def test_an_edit_has_three_lines_on_each_side(
    above: list[str], old: list[str], new: list[str], below: list[str], end: str
) -> None:
    before, after = ("\n".join([*above, *lines, *below]) + end for lines in (old, new))
    edit = RecentEdit.of("a.py", before, after)
    split = [text.replace("\r\n", "\n").splitlines(keepends=True) for text in (before, after)]
    first = next((i for i, (a, b) in enumerate(zip(*split, strict=False)) if a != b), min(map(len, split)))
    start = max(0, first - 3)
    pairs = zip(*(reversed(lines[start:]) for lines in split), strict=False)
    rest = min(map(len, split)) - start
    alike = next((i for i, (a, b) in enumerate(pairs) if a != b), rest)
    shown = ["".join(lines[start : len(lines) - max(0, alike - 3)]) for lines in split]
    assert [edit.before, edit.after] == shown


@pytest.mark.parametrize("given", [("a\n" * 400_000, "b\n" * 400_000, ""), ("", "", "+\n" * 400_000)])
def test_a_long_edit_is_not_split_into_lines(given: tuple[str, str, str]) -> None:
    """A message of 14 million line breaks held up all calls for three seconds, and took 400 MB."""
    tracemalloc.start()
    edit = RecentEdit.of("a.py", *given)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not edit.is_short
    assert peak < 8 * sum(map(len, given))


def test_only_line_feeds_end_the_lines_of_an_edit() -> None:
    before, after = ("a\f\n" + f"x = 'a\u2028{letter}'\n" + "b\x85\n" for letter in "bc")
    edit = RecentEdit.of("a.py", before, after)
    assert edit.diff.splitlines(keepends=False)[0] == "@@ -1,3 +1,3 @@"
    assert edit.diff.split("\n")[2:4] == ["-x = 'a\u2028b'", "+x = 'a\u2028c'"]
    assert RecentEdit.of("a.py", "", "", edit.diff) == edit


def test_an_edit_of_many_lines_is_ignored() -> None:
    """Comparing 2,000 short lines with the lines before them held up all other calls for 0.2 s."""
    assert RecentEdit("a.py", "\n" * RECENT_LINES, "").is_short
    assert not RecentEdit("a.py", "\n" * RECENT_LINES, "\n").is_short


def test_the_text_before_an_edit_is_known_in_a_file_with_crlf() -> None:
    text = FILE.replace("\n", "\r\n")
    edit = RecentEdit.of("a.py", text.replace("area", "f"), text)
    place = EditPlace("a.py", text, text.index("return"), (edit,))
    assert place.earlier_window == place.shown(place.window).replace("area", "f")


def test_a_window_that_lost_the_files_last_line_is_shown_in_whole_lines() -> None:
    tokenizer = CodeTokenizer()
    place = EditPlace("a.py", "a\n", 0, (RecentEdit("a.py", "a\nb", "a\n"),))
    ids = prompt_of(place, tokenizer=tokenizer).request(Request("r", ())).prompt_ids
    assert "original/a.py\na\nb\n<|file_sep|>current/" in tokenizer.decode(ids, skip_special=False)


lines = st.lists(st.sampled_from(["a = 1", "b = 2", "", "return a", "}", "c"]), min_size=2, max_size=15)


@given(lines, lines, st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_applying_the_edits_turns_the_file_into_the_answer(
    old: list[str], new: list[str], ended: bool, end: str
) -> None:
    text = end.join(old) + (end if ended else "")
    place = EditPlace("a.py", text, 0)
    window = [place.lines[i] for i in place.window]
    edits = edits_of("".join(line + "\n" for line in new), place)
    rest = place.lines[place.window.stop :]
    repeated = [i for i in range(len(new)) if new[i:] == rest[: len(new) - i] or not any(new[i:])]
    possible = [[*new[:i], *window[j:], *rest] for i in (len(new), *repeated) for j in range(len(window) + 1)]
    assert applied(text, edits).split(end) in possible
    assert edits == [] or new != window
    assert all(a.end <= b.start for a, b in pairwise(edits))


def make_request(**fields: Any) -> pb.PredictEditRequest:
    recent = pb.RecentEdit(path="book.py", before="def mean(numbers):\n", after="def mean(values):\n")
    defaults = {"path": "book.py", "text": BOOK, "cursor": BOOK.index("if not"), "recent": [recent]}
    return pb.PredictEditRequest(**{**defaults, **fields})


async def test_edits_over_grpc() -> None:
    async with running() as server:
        events = [event async for event in server.completion.PredictEdit(make_request(request_id="mine"))]
        kinds = [event.WhichOneof("event") for event in events]
        assert (kinds[0], kinds[-1], {*kinds[1:-1]}) == ("started", "finished", {"edit"})
        assert events[0].started.request_id == "mine"
        assert events[-1].finished.finish_reason == result_pb2.FINISH_REASON_EOS
        usage = events[-1].finished.usage
        assert usage.accepted_prediction_tokens + usage.rejected_prediction_tokens
        edits = [TextEdit(event.edit.start, event.edit.end, event.edit.text) for event in events[1:-1]]
        # context that would undo the change of the definition is omitted
        wanted = BOOK.replace("values", "numbers").replace("mean(numbers)", "mean(values)")
        assert applied(BOOK, edits) == wanted
        assert await server.idle(submitted=1, aborted=0)


def test_the_place_of_a_predicted_edit_is_read_from_its_message() -> None:
    message = make_request(
        text="x = '😀'\n", cursor=7, unit=pb.OFFSET_UNIT_UTF16,
        recent=[pb.RecentEdit(path="b.py", diff="@@ -1 +1 @@\n-a\n+b\n")],
        extra=[options_pb2.ContextFile(filename="c.py", text="y = 1\n", score=2.0, time_ms=3)],
        diagnostics=[pb.Diagnostic(line=8, message="unknown name")],
    )  # fmt: skip
    violations = ViolationCollector()
    place = read_place(message, violations)
    violations.raise_if_any()
    assert (place.path, place.cursor, place.unit) == ("book.py", 6, OffsetUnit.UTF16)
    assert place.recent == (RecentEdit("b.py", "a\n", "b\n"),)
    assert place.files == (ContextFile("c.py", "y = 1\n", 2.0, 3),)
    assert place.diagnostics == ((8, "unknown name"),)


async def test_every_bad_field_of_a_predicted_edit_is_named() -> None:
    bad = make_request(cursor=10_000, unit=9, max_prompt_tokens=3, ttft_ms=float("inf"))
    bad.sampling.n = 2
    async with running() as server:
        error = await failed(server.completion.PredictEdit(bad))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        fields = {each.field for each in rich(error)[BadRequest].field_violations}
        assert fields == {"cursor", "unit", "max_prompt_tokens", "ttft_ms", "sampling.n"}


def test_of_many_recent_edits_only_the_newest_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compare, compared = RecentEdit.of, list[str]()

    def of(path: str, before: str, *rest: str) -> RecentEdit:
        compared.append(before)
        return compare(path, before, *rest)

    monkeypatch.setattr(RecentEdit, "of", of)
    recent = [pb.RecentEdit(path="b.py", before=f"{i}\n", after="x\n") for i in range(5000)]
    place = read_place(make_request(recent=recent), ViolationCollector())
    assert compared == [f"{i}\n" for i in range(5000 - RECENT_EDITS, 5000)]
    made = prompt_of(place).request(Request("r", ()), "", None, Objective(1e6, (), ()))
    assert made.omitted == (0, 0, 0, 5000 - RECENT_EDITS)
