"""A tiny target whose next token follows from the last one alone, so that a head can learn it in seconds."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from specdec.training.texts import OWN, Text
from tests.models.tiny import VOCAB_SIZE, make_tiny_model

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
