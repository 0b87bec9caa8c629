"""A tiny target whose next token follows from the last one alone, so that a head can learn it in seconds."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from specdec.config import EngineConfig, SpeculationConfig
from specdec.core.types import Delta, Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.build import build_served_engine
from specdec.training.texts import OWN, Text
from tests.engine.tiny_engine import drain
from tests.models.tiny import VOCAB_SIZE, make_tiny_model

CACHE = Path("~/.cache/specdec").expanduser()
_OFTEN = "import specdec.training.trainer as t; t.SAVE_EVERY_S = 0; from specdec.cli.main import cli; cli()"
USED = range(64, 128)  # tokens of the texts
NEXT = list(range(VOCAB_SIZE))  # by token, its successor
NEXT[USED.start : USED.stop] = (64 + torch.randperm(64, generator=torch.Generator().manual_seed(1))).tolist()


@functools.cache
def permuting_target() -> Path:
    """Folder of a llama of six layers that hardly change the embedding; its output table has the rows of `NEXT`."""
    folder = make_tiny_model(
        "llama",
        Path(tempfile.mkdtemp(prefix="specdec-test-")),
        num_hidden_layers=6,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
    )
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.005)
    embed = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"][NEXT] = 2 * torch.nn.functional.normalize(embed)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def permuting_texts(count: int, seed: int = 0, length: int = 48, prompt: int = 32) -> list[Text]:
    """Texts of the target: random prompts and greedy answers."""
    rng, texts = np.random.default_rng(seed), []
    for _ in range(count):
        tokens = rng.integers(USED.start, USED.stop, prompt).tolist()
        while len(tokens) < length:
            tokens.append(NEXT[tokens[-1]])
        texts.append(Text(np.array(tokens, np.int32), 1, prompt, greedy=True, origin=OWN))
    return texts


class PlainDecoder:
    """Stands in for the target's decoder: its features are those of the tokens alone, its next token is `NEXT`."""

    max_rows = 96

    def __init__(self, hidden: int = 24) -> None:
        random = torch.Generator().manual_seed(2)
        self.embed = torch.randn(VOCAB_SIZE, hidden, generator=random)
        self._mix = torch.randn(hidden, 3 * hidden, generator=random) / hidden**0.5
        self.calls = 0

    def forward(self, batch: Any, logit_rows: Any) -> torch.Tensor:
        self.calls += 1
        tokens = torch.from_numpy(batch.tokens).long()
        self.aux_hidden_states = self.embed[tokens] @ self._mix
        return 8 * torch.nn.functional.one_hot(torch.tensor(NEXT)[tokens], VOCAB_SIZE).float()


def head_json(folder: Path) -> dict[str, Any]:
    """A written head's config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def kill_after_a_checkpoint(words: Sequence[str], out: Path, delay_s: float, before: str = "") -> None:
    """Run the command line ``words`` and send SIGKILL ``delay_s`` after the next checkpoint in ``out``.

    before: statements that run first.
    """
    checkpoint = out / "checkpoint.pt"
    known = checkpoint.stat().st_mtime_ns if checkpoint.exists() else None
    killed = subprocess.Popen([sys.executable, "-c", before + _OFTEN, *words])
    while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == known:
        assert killed.poll() is None
        time.sleep(0.01)
    time.sleep(delay_s)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()


def check_drafts(path: Path, drafter: str) -> None:
    """The engine with the drafter at ``path``, the folder of a `head` or a `model`, or the file of an `index`: most
    tokens are accepted; the text is the target's.

    Whoever can read a folder's configuration can read its weights.
    """
    if path.is_dir():
        assert (path / "model.safetensors").stat().st_mode == (path / "config.json").stat().st_mode
    speculation = SpeculationConfig(drafters=(drafter,), profile_s=0, width=1, max_depth=4, max_nodes=4)
    head, model = (str(path) if drafter == name else None for name in ("head", "model"))
    indexes = {"answers": path} if drafter == "index" else {}
    config = EngineConfig(
        target=str(permuting_target()), draft_head=head, draft=model, indexes=indexes, cache_dir=CACHE, threads=1,
        kv_tokens=1024, max_batch=2, max_context=256, max_step_rows=64, prefill_chunk=64, speculation=speculation,
    )  # fmt: skip
    engine = build_served_engine(config)
    wish = SpeculationParams(SpeculationMode.ON, (drafter,), 4, 4, 1)
    tokens = tuple(permuting_texts(1, seed=9, prompt=40, length=40)[0].tokens.tolist())
    stop = StoppingParams(max_tokens=40, ignore_eos=True)
    engine.submit(Request("a", tokens, SamplingParams(temperature=0.0), stop, speculation=wish))
    deltas = [event for event in drain(engine) if isinstance(event, Delta)]
    expected = [tokens[-1]]
    while len(expected) <= 40:
        expected.append(NEXT[expected[-1]])
    assert [token for delta in deltas for token in delta.token_ids] == expected[1:]
    assert len(deltas) < 20
