"""The ranks of a tiny model as threads of the test's process, over a real shared segment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from specdec.models.load import PackedModel
from specdec.models.tensor_parallel.shard_decoder import ShardDecoder, StepSizes, share_pool, shared_shapes
from specdec.models.tensor_parallel.shares import share_layout, share_out
from tests.kernels.natives import CACHE
from verify_kernels.cpu.library import load_library
from verify_kernels.cpu.native_backend import NativeBackend
from verify_kernels.cpu.shared_ranks import SharedRanks, create_segment, segment_bytes
from verify_kernels.forward_batch import ForwardBatch

SIZES = StepSizes(max_rows=64, max_logit_rows=64, max_positions=256, pages=8)


class ThreadTeam:
    """``size`` ranks; `forward` is as of `Decoder`. ``dtype``: of the weights."""

    def __init__(
        self, folder: Path, cache: Path, size: int, dtype: str, kv_dtype: torch.dtype, aux_layers: Sequence[int] = ()
    ) -> None:
        with PackedModel(str(folder), dtype=dtype, cache_dir=cache) as model:  # type: ignore[arg-type]
            config, layout = model.file.config, model.file.layout
            shares = share_out(config, size)
            buffers = [model.file.read_parts(*share_layout(layout, share), lambda done: None) for share in shares]
        shapes = shared_shapes(config, SIZES)
        segment = create_segment(segment_bytes(shapes))
        library = load_library(CACHE)
        self.ranks = [SharedRanks(library, segment, shapes, rank, size, spin_us=0) for rank in range(size)]
        os.close(segment)
        self.decoders: list[ShardDecoder] = []
        for share, buffer, ranks in zip(shares, buffers, self.ranks, strict=True):
            pool = share_pool(share, SIZES, kv_dtype)
            weights = buffer.weights(config)
            aux = aux_layers if share.rank == 0 else ()
            self.decoders.append(ShardDecoder(share, weights, NativeBackend(CACHE, 1), pool, ranks, SIZES, aux))
        self.weight_bytes = [buffer.nbytes for buffer in buffers]
        self._pool = ThreadPoolExecutor(size)

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        self.decoders[0].embed(batch)
        runs = [self._pool.submit(decoder.forward, batch, list(logit_rows)) for decoder in self.decoders]
        results = [run.result(60) for run in runs]
        return results[0]
