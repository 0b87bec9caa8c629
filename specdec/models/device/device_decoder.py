"""A model on a GPU behind the decoder's interface, and the parts a verifier needs to keep a step on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specdec.models.check_batch import check_batch
from specdec.models.device.device_model import DeviceModel
from specdec.models.device.device_network import DeviceNetwork
from specdec.models.device.device_pool import DevicePool
from specdec.models.device.graph_cache import GraphCache
from specdec.models.device.step_arrays import StepArrays
from specdec.models.device.step_buffer import StepBuffer
from specdec.models.device.step_tiers import StepTiers
from verify_kernels.forward_batch import PAGE_SIZE, ForwardBatch


class DeviceDecoder:
    """Runs a model's forward pass over a `ForwardBatch`, as `specdec.models.decoder.Decoder` does.

    ``network``, ``buffer`` and ``graphs`` are for whoever queues more than a forward. ``device`` is a GPU, or the CPU,
    where the kernels are interpreted, for tests. kv_dtype: of the KV pool; None: the rows'.

    Raises:
        ValueError: more logit rows than rows, or a tap is no layer of the model.
    """

    def __init__(
        self,
        model: DeviceModel,
        pages: int,
        device: torch.device,
        *,
        max_entries: int,
        max_rows: int,
        max_logit_rows: int,
        max_positions: int,
        taps: Sequence[int] = (),
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.config, self.device = model, model.config, device
        self.max_rows, self.max_logit_rows, self.max_positions = max_rows, max_logit_rows, max_positions
        self.settling = 2  # kernels are compiled, then the graph is recorded
        if max_logit_rows > max_rows:
            raise ValueError(f"max_logit_rows: {max_logit_rows} exceeds max_rows {max_rows}, which sizes the scratch")
        if any(not 0 <= tap < model.config.n_layers for tap in taps):
            raise ValueError(f"taps: {tuple(taps)} names a layer outside [0, {model.config.n_layers})")
        self.taps = tuple(taps)
        self.pool = DevicePool(model.config, pages, kv_dtype or model.types.rows, device)
        tiers = StepTiers(max_entries, max_rows, max_logit_rows, -(-max_positions // PAGE_SIZE))
        self.network = DeviceNetwork(model, self.pool, tiers.largest, max_positions, taps)
        self.graphs = GraphCache(device)
        self.buffer = StepBuffer(tiers, device, self.graphs.clear)

    @property
    def tapped(self) -> Tensor:
        """Inputs of the tapped layers for the last forward's rows, on the device, in the rows' type."""
        return self.network.tapped

    def plan_coarsely(self, coarse: bool | None) -> None:
        """How attention is cut from now on: in long stretches, in short ones, or, None, as pays. For the self-test: the
        bits are the same."""
        self.graphs.clear()  # they have the choice of their time in them
        self.network.plan_coarsely(coarse)

    def check(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> None:
        """ValueError unless the batch is within the decoder's limits."""
        check_batch(
            batch,
            logit_rows,
            max_rows=self.max_rows,
            max_logit_rows=self.max_logit_rows,
            max_positions=self.max_positions,
            vocab_size=self.config.vocab_size,
            pages=self.pool.pages,
        )

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        """Compute every row, write its KV, and return logits float32 [len(logit_rows), vocab], on the device, of the
        rows named, valid until the next call. Waits until the device is done.

        Raises:
            ValueError: more rows, logit rows or positions than the buffers hold, or a token id out of range.
        """
        self.check(batch, logit_rows)
        step, _ = self.buffer.load(batch, logit_rows)
        self.graphs.run(("forward", step.tier), partial(self._forward, step))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.network.logits_of(len(logit_rows))

    def _forward(self, step: StepArrays) -> None:
        self.network.hidden(step)
        if step.tier.samples:
            self.network.logits(step)
