"""`specdec models list` and `fetch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from specdec.cli.main import cli
from specdec.models.catalogue import CATALOGUE, CatalogueEntry
from specdec.models.fetch import Fetcher


def test_list_shows_local_models(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["models", "list", "--json", "--cache-dir", str(tmp_path)])
    rows = json.loads(result.output)
    assert [(row["name"], row["path"], row["default"]) for row in rows] == [
        ("smollm2-135m", None, True),
        ("qwen2.5-coder-1.5b", None, False),
        ("qwen2.5-coder-0.5b", None, False),
        ("gemma3-270m", None, False),
    ]
    path = Fetcher(tmp_path / "models").path(CATALOGUE["gemma3-270m"])
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(CATALOGUE["gemma3-270m"].size)
    result = CliRunner().invoke(cli, ["models", "list", "--json", "--cache-dir", str(tmp_path)])
    assert [row["path"] for row in json.loads(result.output)] == [None, None, None, str(path)]
    table = CliRunner().invoke(cli, ["models", "list", "--cache-dir", str(tmp_path)]).output
    assert "253 MB" in table
    assert "Apache-2.0" in table


def test_bug_the_list_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe each title stays on its line; in a narrow terminal names stay whole, and nothing is cut."""
    words = ["models", "list", "--cache-dir", str(tmp_path)]
    piped = CliRunner().invoke(cli, words).output
    assert all(entry.title in piped and entry.name in piped for entry in CATALOGUE.values())
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = CliRunner().invoke(cli, words).output
    assert all(entry.name in narrow for entry in CATALOGUE.values())
    assert "…" not in narrow


def test_fetch_prints_the_path_or_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def fetch(self: Fetcher, entry: CatalogueEntry, progress: object) -> Path:
        fetched.append(entry.name)
        return self.path(entry)

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    result = CliRunner().invoke(cli, ["models", "fetch", "gemma3-270m", "--cache-dir", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, f"{tmp_path}/models/gemma3-270m.gguf\n")
    assert fetched == ["gemma3-270m"]
    result = CliRunner().invoke(cli, ["models", "fetch", "gemma", "--cache-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.startswith("Error: gemma: not in the catalogue")
