"""`specdec doctor`: its report on a model, and its exit code."""

from __future__ import annotations

import functools
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from specdec.cli.checks import find_outlook, speed_lines
from specdec.cli.main import cli
from specdec.cli.progress_bar import LiveLine, progress_bars
from specdec.config import EngineConfig
from tests.models.tiny import make_tiny_model
from verify_kernels import backend_selection
from verify_kernels.backend_selection import NumericMode, self_test
from verify_kernels.reference.backend import ReferenceBackend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("doctor") / "t")


@functools.cache
def outcome_of(kind: Any, kv_dtype: torch.dtype) -> NumericMode:
    """The self-test of the reference kernels, which takes seconds."""
    return self_test(ReferenceBackend(1), kind, kv_dtype)


@pytest.fixture(autouse=True)
def one_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(backend: Any, kind: Any, kv_dtype: torch.dtype) -> NumericMode:
        assert isinstance(backend, ReferenceBackend)
        return outcome_of(kind, kv_dtype)

    monkeypatch.setattr(backend_selection, "self_test", outcome)


def doctor(folder: Path, *args: str) -> Result:
    fixed = ["--device", "cpu", "--kernels", "reference", "--cache-dir", str(folder.parent / "cache")]
    return CliRunner().invoke(cli, ["doctor", "--target", str(folder), *fixed, *args])


def test_what_fits_and_the_acceptance_that_a_draft_needs(folder: Path) -> None:
    done = doctor(folder, "--draft", str(folder), "--kv-tokens", "1280", "--max-context", "256")
    assert done.exit_code == 0, done.output
    for kind in ("auto", "int8", "bf16", "fp32"):
        assert f"self-test    {kind}: bitwise" in done.stdout
    assert "needs        it fits" in done.stdout
    assert "4 of 256 tokens at a time, 16 shorter ones (1280 tokens of KV cache, by engine.kv_tokens)" in done.stdout
    (share,) = re.findall(r"pays where more than (\d+)% of its tokens", done.stdout)
    assert 50 <= int(share) <= 100  # the same model, in four bits instead of the target's eight
    free = doctor(folder, "--max-context", "256")
    assert "16 of 256 tokens at a time" in free.stdout
    assert "by 16 sequences of 256 tokens" in free.stdout


@pytest.mark.parametrize(("family", "lines"), [("qwen3", 2), ("qwen3_moe", 1)])
def test_no_acceptance_is_promised_where_rows_choose_experts(family: str, lines: int, tmp_path: Path) -> None:
    model = str(make_tiny_model(family, tmp_path / "m"))
    config = EngineConfig(target=model, draft=model, device="cpu", cache_dir=tmp_path, kv_tokens=1024, max_batch=2)
    assert [name for name, _ in find_outlook(config, 1e9).lines].count("speed") == lines


def test_a_model_that_does_not_fit_is_an_exit_code(folder: Path) -> None:
    done = doctor(folder, "--kv-tokens", str(1 << 40))
    assert done.exit_code == 1
    assert "needs        it does not fit" in done.stdout
    assert "torch " in done.stdout  # versions are reported too
    assert "cannot be served here" in done.stderr
    beyond = doctor(folder, "--max-context", "100000")
    assert (beyond.exit_code, "engine.max_context" in beyond.stdout) == (1, True)


def test_a_model_that_serve_refuses_is_an_exit_code(tmp_path: Path) -> None:
    """What a start refuses after the weights were read is found here before."""
    folder = make_tiny_model("llama", tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    draft = doctor(make_tiny_model("llama", tmp_path / "whole"), "--draft", str(folder))
    for done in (doctor(folder), draft):
        assert (done.exit_code, "no tokenizer.json" in done.stdout) == (1, True)
    wide = make_tiny_model("llama", tmp_path / "wide", head_dim=258)
    done = doctor(wide)
    assert (done.exit_code, "heads of 258" in done.stdout) == (1, True)


def test_missing_values_are_reported_as_unknown(tmp_path: Path) -> None:
    done = doctor(tmp_path / "cache", "--target", "qwen2.5-coder-1.5b")
    assert done.exit_code == 0
    assert "qwen2.5-coder-1.5b is not here; specdec models fetch qwen2.5-coder-1.5b" in done.stdout
    for name, reason in (("/no/model.gguf", "no such file or folder"), ("smollm2-135", "did you mean smollm2-135m?")):
        done = doctor(tmp_path / "cache", "--target", name)
        assert (done.exit_code, reason in " ".join(done.stdout.split())) == (1, True)


@pytest.mark.parametrize("name", ["/no/[slug]/model.gguf", "/no/[/slug]/model.gguf"])
def test_brackets_in_a_path_are_no_markup(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = doctor(tmp_path / "cache", "--target", name)
    assert (done.exit_code, name in done.stdout) == (1, True)
    LiveLine().note(name)
    assert name in capsys.readouterr().err
    error = io.StringIO()
    with progress_bars(Console(file=error, force_terminal=True, width=200)) as progress:
        progress(name, 1, 2)
    assert name in error.getvalue()


def test_a_note_in_a_log_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = " ".join(["held out"] * 20)
    LiveLine().note(line)
    assert capsys.readouterr().err == line + "\n"


def test_the_ceiling_is_bandwidth_over_bytes_read_per_step() -> None:
    first, second = speed_lines(20e9, 400_000_000, 100_000_000)
    assert first == "at most 50 tokens/s without drafts: a step reads 0.40 GB of weights"
    assert "more than 25% of its tokens are accepted" in second
    assert speed_lines(0.0, 1, None) == []
