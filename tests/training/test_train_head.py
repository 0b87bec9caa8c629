"""`specdec train-head` as typed: from a target to a head that serves, also after a SIGKILL."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from draft.head_checkpoint import load_head
from specdec.cli.main import cli
from specdec.models.hf import HFSource
from specdec.training.card import CARD_MARK
from specdec.training.collect import Collector
from specdec.training.draft_model import DraftModel
from specdec.training.head_files import write_head
from specdec.training.session import locked
from specdec.training.states import StateFile
from specdec.training.texts import TrainingError
from tests.models.tiny import VOCAB_SIZE, make_tiny_model
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


@pytest.mark.parametrize("kills", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_killed_training_goes_on_and_its_head_drafts(kills: int, data: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    result = run(data, whole, "--passes", "7")
    assert result.exit_code == 0, result.output
    rng = random.Random(0)
    for _ in range(kills):
        kill_after_a_checkpoint(words(data, cut, "--passes", "7"), cut, rng.uniform(0, 0.2))
    assert not (cut / "model.safetensors").exists()
    result = run(data, cut, "--passes", "7")
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
    assert f"specdec serve --target {permuting_target()} --draft-head FOLDER" in card
    check_drafts(whole, "head")


def test_a_run_ends_in_time_and_says_what_is_left(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path, "--passes", "1")  # has the states
    result = run(data, tmp_path / "short", "--passes", "1000", "--hours", "0.0005")
    assert result.exit_code == 0, result.output
    assert "of the training; run again to go on" in " ".join(result.stderr.split())
    assert head_json(tmp_path / "short")["draft_vocab_size"] == len(USED)


def test_a_target_without_a_chat_template_needs_plain_texts(tmp_path: Path) -> None:
    target = make_tiny_model("llama", tmp_path / "target", num_hidden_layers=6, max_position_embeddings=1024)
    file = target / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    given = tmp_path / "given"
    given.mkdir()
    (given / "a.jsonl").write_text('{"prompt": "Write a haiku about the sea."}\n')

    def collected() -> Result:
        more = ("--target", str(target), "--texts", str(given), "--tokens", "200", "--passes", "0")
        return run(tmp_path / "data", tmp_path / "out", *more)

    assert "--texts: the target has no chat template" in " ".join(collected().output.split())
    (given / "b.txt").write_text("The sea is wide and the ships are many. " * 50)
    assert collected().exit_code == 0
    assert any((tmp_path / "data").iterdir())


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_target_of_few_layers_gets_a_head(layers: int, tmp_path: Path) -> None:
    target = make_tiny_model("llama", tmp_path / "target", num_hidden_layers=layers, max_position_embeddings=1024)
    (tmp_path / "a.txt").write_text("The sea is wide and the ships are many. " * 50)
    more = ("--target", str(target), "--texts", str(tmp_path / "a.txt"), "--tokens", "6000", "--passes", "1")
    result = run(tmp_path / "data", tmp_path / "out", *more)
    assert result.exit_code == 0, result.output
    shape, embed = HFSource(target).config, torch.ones(VOCAB_SIZE, 64)
    head = load_head(tmp_path / "out", dtype="fp32", target=shape, target_embed=embed)
    assert len(head.config.aux_layers) == 3


def test_no_time_for_training_is_said(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateFile, "fill", lambda states, *_: setattr(states, "n_texts", 0))
    result = run(data, tmp_path, "--passes", "1")
    assert "texts; run again to go on" in " ".join(result.stderr.split())
    assert not (tmp_path / "config.json").exists()


def test_no_time_for_a_text_is_said(tmp_path: Path) -> None:
    result = run(tmp_path / "data", tmp_path / "out", "--passes", "1", "--hours", "1e-9")
    assert result.exit_code == 0, result.output
    assert "texts; run again to go on" in " ".join(result.stderr.split())


def test_a_training_that_has_begun_keeps_its_texts(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(data, tmp_path, "--passes", "1")
    monkeypatch.setattr(Collector, "run", lambda *_: pytest.fail("more texts are collected"))
    result = run(data, tmp_path, "--passes", "1", "--tokens", "8000")  # it has 7,680
    assert result.exit_code == 0, result.output
    assert "on which the training has begun" in " ".join(result.stderr.split())


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    def full_file(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_file)
    head = nn.Linear(2, 2)
    head.published = dict  # type: ignore[assignment]
    with pytest.raises(TrainingError, match="free some space"):
        write_head(tmp_path, head, np.arange(2), {"vocab_size": 2}, "")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())  # what was written does not keep the disk full
    config = SimpleNamespace(vocab_size=2)
    model = SimpleNamespace(config=config, save_pretrained=full, to=lambda *_: model, train=lambda: model)
    with pytest.raises(TrainingError, match="free some space"):
        DraftModel(model, 0).write(tmp_path, None, "")  # type: ignore[arg-type]


def test_an_error_while_a_folder_is_locked_is_not_the_locks(tmp_path: Path) -> None:
    lock = tmp_path / "out" / "lock"
    with pytest.raises(TrainingError, match="--out: another run uses"), locked(lock, "--out"), locked(lock, "--out"):
        pytest.fail("the folder is locked twice")
    with pytest.raises(OSError, match="a disk failed"), locked(lock, "--out"):
        raise OSError("a disk failed")


def test_what_cannot_work_is_said(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path, "--passes", "1")
    result = run(data, tmp_path, "--passes", "2")
    assert result.exit_code != 0
    assert "give another folder" in " ".join(result.output.split())
    assert "is the folder of --out" in " ".join(run(data, data, "--passes", "1").output.split())
    short = make_tiny_model("llama", tmp_path / "short", max_position_embeddings=512)
    said = run(data, tmp_path / "out", "--target", str(short)).output
    assert f"--target: {short} has a context of 512 tokens" in " ".join(said.split())
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be written" in " ".join(run(data, blocked / "out", "--passes", "1").output.split())


def test_bug_a_training_does_not_replace_a_model(data: Path, tmp_path: Path) -> None:
    model, notes = tmp_path / "model", tmp_path / "notes"
    shutil.copytree(permuting_target(), model)
    notes.mkdir()
    (notes / "README.md").write_text("mine")
    trained = tmp_path / "trained"
    shutil.copytree(model, trained)
    (trained / "README.md").write_text(CARD_MARK)
    for folder, more, words in (
        (trained, ("--target", str(trained)), "is the folder of --target"),
        (trained, ("--kind", "model", "--draft", str(trained)), "is the folder of --draft"),
        (model, (), "has a config.json and a model.safetensors already"),
        (notes, (), "has a README.md already"),
    ):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        result = run(data, folder, "--passes", "1", *more)
        assert result.exit_code == 1
        assert f"--out: {folder} {words}; give " in " ".join(result.output.split())
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert run(data, model, "--passes", "0").exit_code == 0  # writes no drafter


def test_a_drafter_without_its_checkpoint_is_trained_again(data: Path, tmp_path: Path) -> None:
    for _ in range(2):
        result = run(data, tmp_path, "--passes", "1")
        assert result.exit_code == 0, result.output
        (tmp_path / "checkpoint.pt").unlink()


def test_bug_a_target_that_is_no_name_is_refused_in_one_line(data: Path, tmp_path: Path) -> None:
    result = run(data, tmp_path, "--target", "")
    assert (result.exit_code, "engine.target: " in result.output) == (1, True)


@pytest.mark.parametrize("kind", ["head", "index"])
def test_bug_a_rank_without_effect_is_refused(kind: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["train-head", "--kind", kind, "--out", str(tmp_path), "--rank", "8"])
    assert result.exit_code == 2
    assert "--rank: only --kind model has one" in result.output


def test_a_rank_beyond_all_matrices_is_refused_before_texts_are_collected(tmp_path: Path) -> None:
    given = ["--kind", "model", "--draft", "smollm2-135m", "--out", str(tmp_path), "--rank", str(10**20)]
    result = CliRunner().invoke(cli, ["train-head", *given])
    assert (result.exit_code, "--rank" in result.output) == (2, True)
