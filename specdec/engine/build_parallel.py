"""A target over several processes of one machine (`engine.tp`). Everything else stays in this process."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence

from specdec.config import EngineConfig
from specdec.engine.platform import HostPlatform, Target, check_kv_memory
from specdec.errors import ConfigError
from specdec.models.load import LoadedModel, PackedModel, with_tokenizer
from specdec.models.pack import PackedFileError
from specdec.models.progress import Progress, silent
from specdec.models.tensor_parallel.parallel_decoder import ParallelDecoder
from specdec.models.tensor_parallel.rank_processes import RankProcesses
from specdec.models.tensor_parallel.shard_decoder import StepSizes
from specdec.models.tensor_parallel.shares import rank_processors, share_layout, share_out
from specdec.models.tokenizer import Tokenizer
from verify_kernels.backend_selection import Kernels
from verify_kernels.cpu.shared_ranks import spin_for
from verify_kernels.forward_batch import PAGE_SIZE

_LOG = logging.getLogger(__name__)


class ParallelPlatform(HostPlatform):
    """The CPU, with the target over ``config.tp`` processes of ``threads`` threads each.

    On a machine with several NUMA nodes each process is bound to a node of its own, this one included.

    Raises:
        ConfigError: as `HostPlatform`, or the kernels or this system do not support it.
    """

    def __init__(self, config: EngineConfig, kernels: Kernels, threads: int) -> None:
        if kernels.name != "native":
            raise ConfigError(f"engine.tp: {kernels.name} kernels do not run over processes; set it to 1")
        if not hasattr(os, "memfd_create"):
            raise ConfigError("engine.tp: processes share memory by memfd_create, which this system lacks; set it to 1")
        super().__init__(config, kernels)
        self._cores = os.sched_getaffinity(0)
        if config.tp > len(self._cores):
            _LOG.warning("engine.tp: %d processes on %d cores wait for each other", config.tp, len(self._cores))
        self._threads = threads

    def load_target(self, progress: Progress | None, tokenizer: Tokenizer | None) -> Target:
        """Load this process's share of the target; the other processes start to load theirs."""
        config = self._config
        with PackedModel(
            config.target, dtype=config.dtype, cache_dir=config.cache_dir, progress=progress, packing=self._packing
        ) as model:
            self._share = share_out(model.file.config, config.tp)[0]
            processors = rank_processors(config.tp, self._cores)
            self._others = RankProcesses(model, config.tp, self._threads, config.cache_dir, processors)
            try:
                if processors is not None:
                    _LOG.info("engine.tp: processes stay on processors %s", processors)
                    os.sched_setaffinity(0, processors[0])
                return self._own_share(model, progress or silent, tokenizer)
            except BaseException:
                self._others.close()
                raise

    def _own_share(self, model: PackedModel, progress: Progress, tokenizer: Tokenizer | None) -> Target:
        config, file, name, done = self._config, model.file, model.checkpoint.name, 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            progress(f"loading {name}", done, file.nbytes)

        try:
            buffer = file.read_parts(*share_layout(file.layout, self._share), on_bytes)
        except (PackedFileError, OSError) as error:
            raise model.damaged(error) from None
        shape, found = with_tokenizer(model.checkpoint, file.config, config.cache_dir.expanduser(), tokenizer)
        return LoadedModel(name, shape, config.dtype, buffer.weights(file.config), found, model.key, file.bits)

    def target_decoder(self, model: Target, pages: int, positions: int, aux_layers: Sequence[int]) -> ParallelDecoder:
        """The target's decoder; waits for the other processes."""
        config = self._config
        try:
            check_kv_memory(config, model, pages, self.kv_dtype)
            sizes = StepSizes(config.max_step_rows, config.max_step_rows, positions + PAGE_SIZE, pages)
            return ParallelDecoder(
                dataclasses.replace(self._share, config=model.config), model.weights, self._backend(), self._others,
                sizes, self.kv_dtype, cache_dir=config.cache_dir, aux_layers=aux_layers,
                spin_us=spin_for(config.tp, self._threads, len(self._cores)),
            )  # fmt: skip
        except BaseException:
            self._others.close()
            raise
