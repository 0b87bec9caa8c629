"""`specdec index` and `--index`, as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specdec.cli.main import cli
from specdec.cli.options import pop_config
from specdec.errors import ConfigError
from tests.models.tiny import make_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("model")))


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["index", *words])


def test_index_builds_and_updates(tmp_path: Path, target: str) -> None:
    out, code = str(tmp_path / "x.index"), tmp_path / "src"
    code.mkdir()
    (code / "a.py").write_text("def f(): pass\n")
    (code / "b.txt").write_text("text\n")
    result = run(str(code), "--only", "*.py", "--out", out, "--target", target, "--json")
    assert result.exit_code == 0, result.output
    first: dict[str, Any] = json.loads(result.stdout)
    assert (first["files"], first["read"], first["written"]) == (1, 1, True)
    assert first["bytes"] == Path(out).stat().st_size
    assert "1 files, none changed" in run("--out", out, "--target", target).stdout
    (code / "c.py").write_text("x\n")
    assert "1 of 2 files read" in run("--out", out, "--target", target).stdout  # still only *.py
    Path(out).chmod(0o644)
    (code / "c.py").write_text("xy\n")
    assert run("--out", out, "--target", target).exit_code == 0
    assert Path(out).stat().st_mode & 0o777 == 0o644


def test_a_link_to_an_index_stays(tmp_path: Path, target: str) -> None:
    link, out, code = tmp_path / "link.index", tmp_path / "disk" / "x.index", tmp_path / "a.py"
    out.parent.mkdir()
    link.symlink_to(out)
    for text in ("def f(): pass\n", "x\n"):
        code.write_text(text)
        assert run(str(code), "--out", str(link), "--target", target).exit_code == 0
        assert link.is_symlink()
        assert "none changed" in run("--out", str(out), "--target", target).stdout


def test_an_update_goes_on_without_a_deleted_file(tmp_path: Path, target: str) -> None:
    out, files = str(tmp_path / "x.index"), [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text("def f(): pass\n")
    assert run(*map(str, files), "--out", out, "--target", target).exit_code == 0
    files[0].unlink()
    result = run("--out", out, "--target", target)
    assert "0 of 1 files read" in result.stdout, result.output
    files[0].write_text("def f(): pass\n")
    assert "1 of 2 files read" in run("--out", out, "--target", target).stdout  # it is back
    for file in files:
        file.unlink()
    assert "cannot be read" in run("--out", out, "--target", target).stderr


def test_an_update_keeps_the_vocabulary(tmp_path: Path, target: str) -> None:
    out, code = tmp_path / "x.index", tmp_path / "a.py"
    code.write_text("def f(): pass\n")
    assert run(str(code), "--out", str(out), "--target", target).exit_code == 0
    before, other = out.read_bytes(), str(make_tiny_model("llama", tmp_path / "other", vocab_size=400))
    file = Path(other, "tokenizer.json")
    tokenizer = json.loads(file.read_text())
    swapped = {"a": "b", "b": "a"}
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {swapped.get(token, token): at for token, at in vocab.items()}
    file.write_text(json.dumps(tokenizer))
    result = run("--out", str(out), "--target", other)
    assert result.exit_code == 2
    assert "--target: " in result.stderr
    assert out.read_bytes() == before
    assert run(str(code), "--out", str(out), "--target", other).exit_code == 0  # with PATHs it is built anew
    assert out.read_bytes() != before


def test_mistakes_are_reported(tmp_path: Path, target: str) -> None:
    out = tmp_path / "x.index"
    assert "nothing to index" in run("--out", str(out), "--target", target).stderr
    assert "does not exist" in run(str(tmp_path / "none"), "--out", str(out)).stderr
    out.write_text("something else\n" * 9)
    result = run(str(tmp_path), "--out", str(out), "--target", target)
    assert result.exit_code == 1
    assert "x.index is no index" in result.stderr
    assert out.read_text().startswith("something else")  # any other file is not replaced


def test_indexes_are_named_by_flag() -> None:
    values: dict[str, Any] = {"drafter": (), "index": ("a=/x/a.index", "b=b=c"), "config_file": None}
    engine = pop_config(values).engine
    assert engine.indexes == {"a": Path("/x/a.index"), "b": Path("b=c")}
    assert engine.drafters == ("grammar", "prediction", "suffix", "index")


def test_omitted_repeated_flags_keep_the_configuration_files_values(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engine: {aliases: [gpt-4]}")
    for given, found in (((), ("gpt-4",)), (("gpt-4o", "o1"), ("gpt-4o", "o1"))):
        values = {"drafter": (), "index": (), "config_file": file, "engine__aliases": given}
        assert pop_config(values).engine.aliases == found


def test_a_bad_flag_is_reported() -> None:
    assert "must be NAME=FILE" in CliRunner().invoke(cli, ["serve", "--index", "/x/a.index"]).stderr
    with pytest.raises(ConfigError, match="indexes"):
        pop_config({"drafter": (), "index": ("a/b=file",), "config_file": None})
    with pytest.raises(ConfigError, match="names `index`, but indexes gives none"):
        pop_config({"drafter": ("index",), "index": (), "config_file": None})
    result = CliRunner().invoke(cli, ["generate", "x", "--server", "localhost:1", "--index", "a=file"])
    assert "takes the NAME of one of the server's" in result.stderr
