"""A target's decoder over several ranks: the first in this process, each of the others in its own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.models.decoder import check_batch
from specdec.models.tensor_parallel.rank_processes import RankProcesses
from specdec.models.tensor_parallel.shard_decoder import (
    Command,
    ShardDecoder,
    StepSizes,
    share_pool,
    shared_shapes,
    write_command,
)
from specdec.models.tensor_parallel.shares import RankShare
from specdec.models.weights import ModelWeights
from verify_kernels.backend import Backend
from verify_kernels.cpu.library import load_library
from verify_kernels.cpu.shared_ranks import RankLostError, SharedRanks, create_segment, segment_bytes
from verify_kernels.forward_batch import ForwardBatch
from verify_kernels.packed_weights import HostLinear


@dataclass(slots=True)
class SharedPool:
    """A KV pool whose heads lie in the memory of their ranks."""

    pages: int


class ParallelDecoder:
    """A `TargetDecoder` over several ranks, with the bits of `Decoder`. ``share``, ``weights``: the first rank's.

    The first rank moves KV at once; the others do so with the next forward, which is the first to read it. A forward
    that fails ends the decoder. The other processes end with this object.

    Raises:
        ModelError: a rank could not start.
    """

    settling = 0

    def __init__(
        self,
        share: RankShare,
        weights: ModelWeights[HostLinear],
        backend: Backend,
        others: RankProcesses,
        sizes: StepSizes,
        kv_dtype: torch.dtype,
        *,
        cache_dir: Path,
        spin_us: int,
        aux_layers: Sequence[int] = (),
    ) -> None:
        self.config, self.pool, self.aux_layers = share.config, SharedPool(sizes.pages), tuple(aux_layers)
        self.max_rows, self.max_logit_rows = sizes.max_rows, sizes.max_logit_rows
        self.max_positions = sizes.max_positions
        shapes = shared_shapes(share.config, sizes)
        segment = create_segment(segment_bytes(shapes))
        try:
            ranks = SharedRanks(load_library(cache_dir), segment, shapes, share.rank, share.size, spin_us)
            setup = {"sizes": asdict(sizes), "kv_dtype": str(kv_dtype), "spin_us": spin_us}
            others.begin(setup, segment, ranks.break_up)
        finally:
            os.close(segment)
        self._ranks, self._others = ranks, others
        self.close = weakref.finalize(self, others.close)
        self._words = ranks.buffer("command").view(torch.int32)[0].numpy()
        self._own = ShardDecoder(share, weights, backend, share_pool(share, sizes, kv_dtype), ranks, sizes, aux_layers)
        self._moves = Command()

    @property
    def aux_hidden_states(self) -> Tensor:
        """See `Decoder`."""
        return self._own.aux_hidden_states

    def check(self) -> None:
        """Raises RankLostError if a rank is gone."""
        if self._others.lost:
            raise RankLostError(self._others.lost)

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        """See `Decoder.forward`.

        Raises:
            ValueError: as `Decoder.forward`; the ranks have not received the batch then.
            RankLostError: a rank is gone.
        """
        check_batch(self, batch, logit_rows)
        self.check()
        self._own.embed(batch)
        return self._run(Command(self._moves.source, self._moves.target, batch, logit_rows))

    def final_states(self, rows: slice) -> NDArray[np.float64]:
        """See `TargetDecoder.final_states`."""
        return self._own.final_states(rows)

    def move_kv(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """See `Decoder.move_kv`."""
        self._own.move_kv(source, target)
        if len(self._moves.source) + len(source) > self.max_rows:
            self._run(self._moves)
        self._moves.source += source.tolist()
        self._moves.target += target.tolist()

    def _run(self, command: Command) -> Tensor:
        try:
            write_command(command, self._words)
            self._ranks.meet()
            self._moves = Command()
            if command.batch is None:
                self._ranks.meet()
                return torch.empty(0)
            return self._own.forward(command.batch, command.logit_rows)
        except RankLostError:
            raise RankLostError(self._others.lost) from None
        except BaseException:
            self._ranks.break_up()  # the others wait in the middle of the forward
            raise
