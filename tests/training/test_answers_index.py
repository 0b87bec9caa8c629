"""`specdec train-head --kind index`: an index of what the target answers."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from draft.token_index import TokenIndex
from specdec.cli.main import cli
from tests.training.permuting_target import check_drafts, permuting_target


def test_an_index_of_the_texts_drafts(data: Path, tmp_path: Path) -> None:
    words = ["train-head", "--kind", "index", "--target", str(permuting_target()), "--data", str(data), "--tokens", "1"]
    result = CliRunner().invoke(cli, [*words, "--out", str(tmp_path), "--threads", "1"])
    assert result.exit_code == 0, result.output
    index = TokenIndex(tmp_path / "answers.index")
    assert index.header.tokens == 120 * (63 + 1)  # all but the lead's token of each, and one after it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.index", "lock"]  # nothing was trained
    check_drafts(index.path, "index")
    data_before = index.path.read_bytes()
    said = CliRunner().invoke(cli, ["index", "--out", str(index.path), "--target", str(permuting_target())])
    assert "answers.index is no index of files to bring up to date" in " ".join(said.stderr.split())
    assert index.path.read_bytes() == data_before


def test_no_text_is_no_index(tmp_path: Path) -> None:
    words = ["train-head", "--kind", "index", "--target", str(permuting_target()), "--hours", "1e-9"]
    result = CliRunner().invoke(cli, [*words, "--out", str(tmp_path), "--threads", "1"])
    assert "--hours: over before a text was complete" in result.stderr
    assert not (tmp_path / "answers.index").exists()
