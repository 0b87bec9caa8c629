"""Loads a model for the CPU by name: its packed weights, from the cache where they are, and its tokenizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from specdec.config import WeightDtype
from specdec.errors import ModelError
from specdec.models.checkpoint import Checkpoint
from specdec.models.config import ModelConfig
from specdec.models.memory import check_memory
from specdec.models.pack import PackedCache, cut_output, digest_of, pack_model, sums_of
from specdec.models.progress import Progress, silent
from specdec.models.resolve import resolve
from specdec.models.tokenizer import Tokenizer
from specdec.models.vocabulary_cut import VocabularyCut
from specdec.models.weights import L, ModelWeights, layout_bytes, plan_layout
from verify_kernels.packed_weights import HostLinear, RoundBlocks, round_blocks


@dataclass(frozen=True, slots=True)
class LoadedModel(Generic[L]):
    """A model for the CPU (`load_model`) or a GPU (`specdec.models.device_weights.load_device_model`)."""

    name: str
    config: ModelConfig
    dtype: str  # of the layers' weights, for people
    weights: ModelWeights[L]
    tokenizer: Tokenizer
    digest: str = ""  # over the packed weights; on a GPU over the source they were read from and their type


HostModel = LoadedModel[HostLinear]


def load_model(
    ref: str,
    *,
    dtype: WeightDtype,
    cache_dir: Path,
    progress: Progress | None = None,
    cut: VocabularyCut | None = None,
    round_blocks: RoundBlocks = round_blocks,
) -> HostModel:
    """Load the model ``ref``: an HF folder, a .gguf file, a catalogue name or hub id (fetched if missing), or
    "random:SHAPE" (`RANDOM_SHAPES`).

    cut: the tokens that the output table keeps, if the model has that vocabulary. round_blocks: rounds weights to
    blocks; the default, in torch, takes ten times as long as the native one.

    Packed weights and converted tokenizers are cached in ``cache_dir``; a damaged cache is rebuilt.

    Raises:
        ModelError: not found, truncated, corrupt, without tokenizer, or too large for the available memory.
        UnsupportedModelError: the architecture or a tensor type is not supported.
    """
    progress = progress or silent
    checkpoint = resolve(ref, cache_dir, progress)
    if cut is not None:
        checkpoint = cut_output(checkpoint, cut, dtype, cache_dir)
    cache = PackedCache(cache_dir / "packed", checkpoint, dtype)
    file, buffer = cache.open(), None
    if file is not None:
        check_memory(checkpoint.name, file.nbytes, dtype)
        buffer = cache.read(file, progress)
    if file is not None and buffer is not None:
        config, digest = file.config, file.digest
    else:
        source = checkpoint.open()
        check_memory(checkpoint.name, layout_bytes(plan_layout(source, dtype)), dtype)
        config, buffer = source.config, pack_model(source, dtype, progress, round_blocks)
        sums = sums_of(buffer)
        digest = digest_of(buffer.layout, sums)
        if checkpoint.keeps_packed:
            cache.write(config, buffer, sums)
    tokenizer = checked_tokenizer(checkpoint, config, cache_dir)
    return LoadedModel(checkpoint.name, config, dtype, buffer.weights(config), tokenizer, digest)


def checked_tokenizer(checkpoint: Checkpoint, config: ModelConfig, cache_dir: Path) -> Tokenizer:
    """The tokenizer of a model of shape ``config``.

    Raises:
        ModelError: there is no tokenizer, or the model lacks a row for one of its tokens.
    """
    tokenizer = checkpoint.tokenizer(cache_dir)
    if tokenizer.base_size > config.vocab_size:
        raise ModelError(
            f"{checkpoint.name}: the tokenizer's ids go up to {tokenizer.base_size - 1}, the model has "
            f"{config.vocab_size} rows; they do not belong together, fetch the model again"
        )
    beyond = [tokenizer.token_bytes(i) for i in sorted(tokenizer.special_ids) if i >= config.vocab_size]
    names = [name.decode(errors="replace") for name in beyond]
    if lost := [name for name in names if tokenizer.template_mentions(name)]:
        said = "%s: the chat template writes %s, for which the model has no row; such chats are refused: fetch it again"
        logging.getLogger(__name__).warning(said, checkpoint.name, ", ".join(lost))
    return tokenizer
