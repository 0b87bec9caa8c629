"""How segments become a fill-in-the-middle prompt."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.completion.documents import Gap
from server.http.tabby import COMPLETION_FIELDS, is_tabbys, read_segments, with_line_ends
from server.json_body import Body
from server.request_fields import read_request
from specdec.errors import ViolationCollector

KINDS = (
    "declarations", "relevant_snippets_from_changed_files", "relevant_snippets_from_recently_opened_files",
)  # fmt: skip
LINES = st.lists(st.sampled_from(["a", "\n", "\r\n", "", "é"]), max_size=12).map("".join)


def read(**fields: Any) -> Gap:
    violations = ViolationCollector()
    body = Body({"language": "python", "segments": {"prefix": "", **fields}}, violations)
    gap, _ = read_segments(body, read_request(body, COMPLETION_FIELDS).own)
    assert not violations.found
    return gap


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://git.invalid/team/book.git", "book"), ("https://git.invalid/team/book/", "book"),
        ("git@git.invalid:book.git", "book"), ("git@git.invalid:team/my.book", "my.book"), ("book", "book"),
        ("", ""), (None, ""),
    ],
)  # fmt: skip
def test_project_name(url: str | None, name: str) -> None:
    assert read(git_url=url).repo == name


@given(scores=st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.none(), min_size=3, max_size=3))
def test_kinds_keep_their_order_whatever_their_scores(scores: list[float | None]) -> None:
    fields = {kind: [{"filepath": kind, "body": "x", "score": s}] for kind, s in zip(KINDS, scores, strict=True)}
    files = read(**fields, clipboard="x").files
    ranked = sorted(files, key=lambda file: -file.score)
    assert [file.name for file in ranked] == [*KINDS, "clipboard"]
    assert len({file.score for file in files}) == 4


@given(scores=st.lists(st.floats(0, 100), min_size=2, max_size=5))
def test_the_clients_order_within_a_kind_is_kept(scores: list[float]) -> None:
    items = [{"filepath": str(i), "body": "x", "score": score} for i, score in enumerate(scores)]
    ranked = read(relevant_snippets_from_changed_files=items).files
    for one, other in itertools.pairwise(ranked):
        a, b = scores[int(one.name)], scores[int(other.name)]
        assert (one.score >= other.score) or a < b
        assert (one.score <= other.score) or a > b


def test_segments_describe_the_place_and_the_texts_around_it() -> None:
    found = read(
        prefix="a\r\n", suffix="\r\nb", filepath="src/mean.py", git_url="https://git.invalid/team/book.git",
        clipboard="pasted\r\n", declarations=[{"filepath": "declared.py", "body": "DECLARED\r\n"}],
    )  # fmt: skip
    assert (found.prefix, found.suffix) == ("a\n", "\nb")
    assert (found.path, found.repo, found.language) == ("src/mean.py", "book", "python")
    assert {file.name: file.text for file in found.files} == {"declared.py": "DECLARED\n", "clipboard": "pasted\n"}


def test_empty_snippets_are_omitted() -> None:
    items = [{"filepath": "a", "body": " \n"}, {"filepath": "b"}, {"body": "x"}, {}]
    found = read(declarations=items, clipboard=" ", suffix=None)
    assert [(file.name, file.text) for file in found.files] == [("", "x")]
    assert (found.suffix, found.path, found.language) == ("", "", "python")


@given(before=LINES, behind=LINES, written=LINES)
def test_line_breaks(before: str, behind: str, written: str) -> None:
    body = Body({"segments": {"prefix": before, "suffix": behind}}, ViolationCollector())
    gap, crlf = read_segments(body, read_request(body, COMPLETION_FIELDS).own)
    own = with_line_ends(written, crlf=crlf)
    if "\r\n" not in before and "\r\n" not in behind:
        assert (gap.prefix, own) == (before, written)
        return
    assert "\r\n" not in gap.prefix + gap.suffix
    assert own.count("\n") == own.count("\r\n") == written.count("\n")
    assert own.replace("\r\n", "\n") == written.replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"segments": {}}, True), ({"segments": None}, True), ({"language": "c"}, True),
        ({"segments": {}, "prompt": None}, True), ({"segments": {}, "prompt": ""}, False), ({}, False),
        ({"language": "c", "prompt": "a"}, False), ({"user": "a"}, False), ({"prompt": "a", "suffix": "b"}, False),
    ],
)  # fmt: skip
def test_which_dialect_a_body_belongs_to(body: dict[str, Any], wanted: bool) -> None:
    assert is_tabbys(body) is wanted
