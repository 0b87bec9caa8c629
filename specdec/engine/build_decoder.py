"""A model, its KV pool and its buffers as one decoder, if memory allows."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.config import EngineConfig
from specdec.errors import ModelError
from specdec.models import LoadedModel
from specdec.models.decoder import Decoder
from specdec.models.kv_pool import KvPool
from specdec.models.memory import available_bytes
from verify_kernels.backend import Backend
from verify_kernels.forward_batch import PAGE_SIZE


def build_decoder(
    config: EngineConfig,
    model: LoadedModel,
    backend: Backend,
    pages: int,
    positions: int,
    already_promised: int = 0,
    taps: Sequence[int] = (),
) -> Decoder:
    """A decoder with a KV pool of ``pages`` pages, for sequences of up to ``positions`` tokens and room for a tree.

    already_promised: bytes that others will take and have not yet. taps: layers whose inputs are kept.

    Raises:
        ModelError: memory is short.
    """
    need = pages * KvPool.bytes_per_page(model.config)
    # Pools and logits take their memory page by page: what is promised is not yet missing from what is free.
    promised = config.max_step_rows * model.config.vocab_size * 4 + already_promised
    free = available_bytes() - promised
    if need > free:
        raise ModelError(
            f"engine.kv_tokens: the KV cache of {model.name} needs {need / 2**30:.1f} GiB, "
            f"{max(free, 0) / 2**30:.1f} GiB are free; lower kv_tokens"
        )
    return Decoder(
        model.config,
        model.weights,
        backend,
        KvPool(model.config, pages),
        max_rows=config.max_step_rows,
        max_logit_rows=config.max_step_rows,
        max_positions=positions + PAGE_SIZE,
        taps=taps,
    )
