"""A small model that learns the target's distributions, and its folder.

Its weights are trained, or matrices of low rank that are added to them (LoRA, Hu et al., arXiv 2106.09685).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specdec.models.tokenizer import Tokenizer
from specdec.training.texts import writing
from specdec.training.trainer import Batch, Student

LOW_RANK_RATE, FULL_RATE = 2e-4, 1e-5  # of learning, at its peak
_SCALE = 2.0  # of the added matrices, whatever their rank


class _LowRank(nn.Module):
    """Adds a product of two thin matrices to a weight [out, in]. It is zero at first."""

    def __init__(self, weight: Tensor, rank: int, random: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.down = nn.Parameter(torch.randn(rank, inputs, generator=random) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + _SCALE * self.up @ self.down


class DraftModel(Student):
    """A causal model of transformers, float32, as a `Student`.

    rank: of the matrices added to the linear layers; 0: every weight is trained.
    """

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        self.model, self._rank = model.train(), rank
        self.vocab_size = int(model.config.vocab_size)  # rows of the output table
        if rank:
            model.requires_grad_(False)
            random = torch.Generator().manual_seed(0)
            for layer in self._linear_layers():
                parametrize.register_parametrization(layer, "weight", _LowRank(layer.weight, rank, random))

    def _linear_layers(self) -> list[nn.Linear]:
        return [layer for layer in self.model.base_model.modules() if isinstance(layer, nn.Linear)]

    def loss(self, batch: Batch) -> Tensor:
        """A mean over slots."""
        valid = batch.valid(0)
        logits = self._logits(batch, valid)
        ids, chances = batch.ids[valid], batch.chances[valid]
        logprobs = logits.gather(1, ids.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
        return -(chances * logprobs).sum() / len(ids)

    def hits(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        valid = batch.valid(0)
        hit = torch.zeros_like(valid)
        hit[valid] = self._logits(batch, valid).argmax(-1) == batch.ids[valid][:, 0]
        for step in range(steps):  # a chain whose tokens are right so far reads the text itself
            yield hit.roll(-step, 1)

    def _logits(self, batch: Batch, valid: Tensor) -> Tensor:
        """Of the valid slots, float32 [slots, vocab]."""
        tokens = torch.cat((batch.begin, batch.following), 1)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=multiplies_bf16(tokens.device)):
            hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, 1:]
            logits: Tensor = self.model.get_output_embeddings()(hidden[valid])
        return logits.float()

    def write(self, folder: Path, tokenizer: Tokenizer, card: str) -> None:
        """Write a model folder: bf16 safetensors, config.json, the tokenizer and README.md.

        It ends the training: the model is merged and becomes bf16 in place.

        Raises:
            TrainingError: the disk is full.
        """
        for layer in self._linear_layers() if self._rank else ():
            parametrize.remove_parametrizations(layer, "weight")
        with writing("--out", folder):
            self.model.to("cpu", torch.bfloat16).save_pretrained(folder)
            for weights in folder.glob("*.safetensors"):  # which the library writes with mode 0600
                shutil.copymode(folder / "config.json", weights)
            tokenizer.save(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")


def multiplies_bf16(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices are faster than of float32."""
    return device.type == "cuda" or bool(torch.cpu.get_capabilities().get("amx_bf16"))
