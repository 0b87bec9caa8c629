"""`specdec train-head` as typed: from a target to a head that serves, also after a SIGKILL."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from specdec.cli.main import cli
from specdec.config import EngineConfig, SpeculationConfig
from specdec.core.types import Delta, Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.build import build_engine, build_parts
from specdec.training.session import TrainingPlan, engine_config
from specdec.training.texts import TextStore
from tests.engine.tiny_engine import drain
from tests.training.permuting_target import NEXT, USED, head_json, permuting_target, permuting_texts

CACHE = Path("~/.cache/specdec").expanduser()
OFTEN = "import specdec.training.trainer as t; t.SAVE_EVERY_S = 0; from specdec.cli.main import cli; cli()"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of texts of the permuting target."""
    folder = tmp_path_factory.mktemp("data")
    plan = TrainingPlan(str(permuting_target()), folder, folder, threads=1, cache_dir=CACHE)
    weights = build_parts(engine_config(plan)).info.numeric_fingerprint[:8]
    store = TextStore(folder, weights)
    for text in permuting_texts(120, length=64, prompt=40):
        store.append(text)
    store.close()
    return folder


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
    checkpoint, rng = cut / "checkpoint.pt", random.Random(0)
    for _ in range(5):
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else None
        killed = subprocess.Popen([sys.executable, "-c", OFTEN, *words(data, cut, "--passes", "10")])
        while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before:
            assert killed.poll() is None
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
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
    check_drafts(whole)


def check_drafts(folder: Path) -> None:
    """The engine with the head: most drafted tokens are accepted, and the text is the target's."""
    speculation = SpeculationConfig(drafters=("head",), profile_s=0, width=1, max_depth=4, max_nodes=4)
    config = EngineConfig(
        target=str(permuting_target()), draft_head=str(folder), cache_dir=CACHE, threads=1, kv_tokens=1024,
        max_batch=2, max_context=256, max_step_rows=64, prefill_chunk=64, speculation=speculation,
    )  # fmt: skip
    engine = build_engine(config)
    wish = SpeculationParams(SpeculationMode.ON, ("head",), 4, 4, 1)
    tokens = tuple(permuting_texts(1, seed=9, prompt=40, length=40)[0].tokens.tolist())
    stop = StoppingParams(max_tokens=40, ignore_eos=True)
    engine.submit(Request("a", tokens, SamplingParams(temperature=0.0), stop, speculation=wish))
    deltas = [event for event in drain(engine) if isinstance(event, Delta)]
    expected = [tokens[-1]]
    while len(expected) <= 40:
        expected.append(NEXT[expected[-1]])
    assert [token for delta in deltas for token in delta.token_ids] == expected[1:]
    assert len(deltas) < 20


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
