"""Real next edits: found between two releases, fetched once, and measured on every road."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from bench.workloads.next_edit import CLEAR, RECENT, NextEdit, Release, apply_edits, next_edits
from bench.workloads.workload import WorkloadUnavailableError
from server.completion.documents import TextEdit

FUNCTIONS = 8


def source_text(suffix: str, changed: int = FUNCTIONS) -> str:
    """Functions far apart. The first ``changed`` of them call ``render`` with a suffix."""
    return "".join(
        f"def part_{i}(value):\n" + f"    # {i} says nothing new\n" * 30
        + f"    return render{suffix if i < changed else ''}(value, {i})\n\n\n"
        for i in range(FUNCTIONS)
    )  # fmt: skip


def release(folder: Path, version: str, modules: dict[str, str]) -> Release:
    """A wheel in the workload's folder, as pip leaves it there."""
    file = folder / f"made-{version}" / f"made-{version}-py3-none-any.whl"
    file.parent.mkdir(parents=True)
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in modules.items():
            archive.writestr(name, text)
    return Release("made", version, hashlib.sha256(file.read_bytes()).hexdigest())


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Release, Release]:
    old = {"made/a.py": source_text(""), "made/same.py": source_text(""), "made/gone.py": "x = 1\n", "made/t.txt": "a"}
    new = {"made/a.py": source_text("_html"), "made/same.py": source_text(""), "made/t.txt": "b"}
    return release(tmp_path, "1.0", old), release(tmp_path, "2.0", new)


def found(folder: Path, pair: tuple[Release, Release]) -> list[NextEdit]:
    return next_edits(folder, [pair])


def test_the_next_change_follows_those_before_it_in_the_file(tmp_path: Path, pair: tuple[Release, Release]) -> None:
    edits = found(tmp_path, pair)
    assert edits == found(tmp_path, pair)
    assert len({edit.name for edit in edits}) == len(edits) == 5
    for edit in edits:
        place = edit.place
        number = place.text.count("render_html")
        assert place.text == source_text("_html", number)
        assert edit.after == source_text("_html", number + 1)
        assert place.text[place.cursor :].startswith(f"    return render(value, {number})")
        assert [each.after.count("render_html") for each in place.recent] == [1] * min(RECENT, number)
        assert len(place.window) == 2 * CLEAR + 1


def test_lines_right_compares_the_window_with_the_authors(tmp_path: Path, pair: tuple[Release, Release]) -> None:
    edit = found(tmp_path, pair)[0]
    text, at = edit.place.text, edit.place.text.index("render(", edit.place.cursor)
    right = apply_edits(text, [TextEdit(at, at + 6, "render_html")])
    assert right == edit.after
    assert edit.lines_right(right) == 1
    assert edit.lines_right(text) == pytest.approx(20 / 21)
    assert edit.lines_right(apply_edits(text, [TextEdit(0, 0, "above = 1\n")])) < 1
    assert edit.lines_right(apply_edits(right, [TextEdit(at, at, "x\n")])) < 1


NEAR = "render(0)\n" + "x\n" * 5 + "render(1)\n" + "x\n" * 30
OTHER = source_text("_html", 1).replace("part_5(value)", "other(value)")


@pytest.mark.parametrize(
    ("old", "new"),
    [(source_text(""), OTHER), (NEAR, NEAR.replace("render", "render_html"))],
    ids=["no word of the recent changes", "another change in its window"],
)
def test_no_next_edit(old: str, new: str, tmp_path: Path) -> None:
    pair = release(tmp_path, "1", {"a.py": old}), release(tmp_path, "2", {"a.py": new})
    assert not found(tmp_path, pair)


def test_without_the_index_the_message_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    missing = Release("specdec-made", "9.9", "00")
    with pytest.raises(WorkloadUnavailableError, match=r"specdec-made==9\.9: pip could not get it"):
        found(tmp_path, (missing, missing))


def test_another_file_than_expected_is_refused(tmp_path: Path, pair: tuple[Release, Release]) -> None:
    with pytest.raises(WorkloadUnavailableError, match="SHA-256"):
        found(tmp_path, (pair[0]._replace(sha256="00"), pair[1]))
