"""`specdec train-head` as typed: from a target to a head that serves, also after a SIGKILL."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from specdec.cli.main import cli
from tests.training.permuting_target import (
    USED,
    check_drafts,
    head_json,
    kill_after_a_checkpoint,
    permuting_target,
)


def words(data: Path, out: Path, *more: str) -> list[str]:
    return [
        "train-head", "--target", str(permuting_target()), "--data", str(data), "--out", str(out), "--tokens", "1",
        "--threads", "1", *more,
    ]  # fmt: skip


def run(data: Path, out: Path, *more: str) -> Result:
    result = CliRunner().invoke(cli, words(data, out, *more))
    torch.set_num_threads(1)
    return result


def test_a_training_killed_five_times_goes_on_and_its_head_drafts(data: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    result = run(data, whole, "--passes", "10")
    assert result.exit_code == 0, result.output
    rng = random.Random(0)
    for _ in range(5):
        kill_after_a_checkpoint(words(data, cut, "--passes", "10"), cut, rng.uniform(0, 0.2))
    assert not (cut / "model.safetensors").exists()
    result = run(data, cut, "--passes", "10")
    assert result.exit_code == 0, result.output
    expected, found = (load_file(folder / "model.safetensors") for folder in (whole, cut))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert "embed_tokens.weight" not in found
    shares = head_json(whole)["specdec"]["acceptance"]
    assert shares == head_json(cut)["specdec"]["acceptance"]
    assert min(shares[:3]) > 0.6
    card = (whole / "README.md").read_text()
    assert f"| {shares[0]:.3f} |" in card
    assert "prompts that the target wrote itself | " in card
    check_drafts(whole, "head")


def test_a_run_ends_in_time_and_says_what_is_left(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path, "--passes", "1")  # has the states
    result = run(data, tmp_path / "short", "--passes", "1000", "--hours", "0.0005")
    assert result.exit_code == 0, result.output
    assert "of the training; run again to go on" in " ".join(result.stderr.split())
    assert head_json(tmp_path / "short")["draft_vocab_size"] == len(USED)


def test_what_cannot_work_is_said(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path, "--passes", "1")
    result = run(data, tmp_path, "--passes", "2")
    assert result.exit_code != 0
    assert "give another folder" in " ".join(result.output.split())
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be written" in " ".join(run(data, blocked / "out", "--passes", "1").output.split())
