"""A model on a GPU: KV pool, forward by the Triton kernels, CUDA graphs by size of step, start-up self-test."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.models.config import ModelConfig
from specdec.models.decoder import check_batch, final_norm, rope_tables
from specdec.models.device_step import StepArrays, StepBuffer, StepTier, StepTiers
from specdec.models.device_weights import DeviceLinear, DeviceModel, ReferenceLinear
from specdec.models.weights import LayerWeights
from verify_kernels.backend_selection import NumericMode
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.gpu.attention_plan import attention_plan
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.kv_ops import write_kv
from verify_kernels.gpu.norm import norm_rows
from verify_kernels.gpu.tree_attention import tree_attention

_LOG = logging.getLogger(__name__)


class DevicePool:
    """K and V, each [layers, pages, kv_heads, 64, head_dim], zero-filled: slots never written are read, then masked.

    Float8 needs no scales: keys and values of trained models lie far within its range, and its precision is relative.
    """

    def __init__(self, config: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.n_layers, pages, config.n_kv_heads, PAGE_SIZE, config.head_dim)
        self.pages = pages
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        return self.k[index], self.v[index]


MAX_GRAPHS = 256  # CUDA graphs in the cache; each takes a few MB of host memory


class GraphCache:
    """Captures work as CUDA graphs by key. The same key must mean the same launches on the same memory.

    On a GPU a key's work runs eagerly the first time, which compiles its kernels, is captured the second time and
    replayed from then on. Work that cannot be captured, and any elsewhere, always runs eagerly.
    """

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph | None] = OrderedDict()  # None: cannot be captured
        self._seen: set[Hashable] = set()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Queue the work of ``key``."""
        if not self._captures:
            work()
        elif key not in self._seen:
            work()
            self._seen.add(key)
        else:
            if key not in self._graphs:
                self._capture(key, work)
            self._graphs.move_to_end(key)
            graph = self._graphs[key]
            work() if graph is None else graph.replay()

    def clear(self) -> None:
        """Drop all graphs, before the memory that they use is freed."""
        self._graphs.clear()

    def _capture(self, key: Hashable, work: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
            self._graphs[key] = graph
        except RuntimeError as error:
            _LOG.warning("steps of %s run without a CUDA graph: %s", key, error)
            self._graphs[key] = None
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)


class DeviceNetwork:
    """A model's layers on a GPU. Rows do not depend on each other, nor on the tier.

    All memory is allocated here, for steps up to ``largest``. A forward allocates nothing and waits for nothing, so
    that it can be captured. ``aux_layers``: see `specdec.models.decoder.Decoder`; ``aux_hidden_states`` has the rows'
    type.
    """

    def __init__(
        self,
        model: DeviceModel,
        pool: DevicePool,
        largest: StepTier,
        max_positions: int,
        aux_layers: Sequence[int] = (),
    ) -> None:
        self._config, self._weights, self._pool, self.aux_layers = model.config, model.weights, pool, tuple(aux_layers)
        c, device, rows = model.config, pool.k.device, largest.rows

        def floats(*shape: int, dtype: torch.dtype = model.weights.final_norm.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.residual = floats(rows, c.hidden_size)  # after the last layer of a forward, before the final norm
        self._y = floats(rows, c.hidden_size)
        self._qkv, self._attended = floats(rows, c.q_size + 2 * c.kv_size), floats(rows, c.q_size)
        self._gate_up = floats(rows, 2 * c.intermediate_size)
        self._chosen = floats(largest.samples, c.hidden_size)
        self._logits = floats(largest.samples, c.vocab_size, dtype=torch.float32)
        self.aux_hidden_states = floats(rows, len(self.aux_layers) * c.hidden_size)
        self._angles = [
            tuple(t.to(device) for t in rope_tables(c.rope, c.head_dim, max_positions, local=local))
            for local in c.rope.kinds
        ]
        self.workspace = AttentionWorkspace.allocate(
            heads=c.n_heads, kv_heads=c.n_kv_heads, head_dim=c.head_dim, kv_dtype=pool.k.dtype, max_rows=rows,
            max_entries=largest.entries, max_pages=largest.pages, device=device,
        )  # fmt: skip

    def use_reference_layers(self) -> None:
        """From now on compute linear layers, with their norms and gates, in plain torch."""
        self._weights = self._weights.with_linears(ReferenceLinear)

    def forward(self, step: StepArrays) -> None:
        """Compute every row through all layers, write its KV, and compute the logits of the step's logit rows."""
        rows = step.tier.rows
        x = self.residual[:rows]
        torch.index_select(cast(Tensor, self._weights.embed), 0, step.tokens, out=x)
        if self._config.embed_scale != 1:
            x.mul_(self._config.embed_scale)
        self.plan(step)
        for index, layer in enumerate(self._weights.layers):
            self._keep_aux(index, x)
            self._attend(index, layer, x, step)
            gate_up = self._gate_up[:rows]
            layer.gate_up.normed(x, layer.mlp_norm, self._config.norm_eps, gate_up)
            if layer.mlp_post_norm is None:
                layer.down.gated(gate_up, self._config.gate, x, x)
            else:
                y = self._y[:rows]
                layer.down.gated(gate_up, self._config.gate, y, None)
                norm_rows(y, layer.mlp_post_norm, x, eps=self._config.norm_eps, adds=True)
        if step.tier.samples:
            chosen, logits = self._chosen[: step.tier.samples], self.logits(step.tier.samples)
            torch.index_select(x, 0, step.logit_rows, out=chosen)
            self._weights.lm_head.normed(chosen, self._weights.final_norm, self._config.norm_eps, logits)

    def plan(self, step: StepArrays) -> None:
        """Plan attention for all layers of a step."""
        attention_plan(step, self.workspace)

    def attend(self, index: int, qkv: Tensor, out: Tensor | None, step: StepArrays) -> None:
        """Layer ``index``'s attention, after `plan`: q of ``qkv`` is turned in place, K and V go to the pool.

        out: None stops there.
        """
        c, layer, rows = self._config, self._weights.layers[index], step.tier.rows
        window, q = c.window(index), qkv.view(rows, -1, c.head_dim)[:, : c.n_heads]
        pools, (cos, sin) = self._pool.layer(index), self._angles[-1 if c.local(index) else 0]
        write_kv(qkv, q, *pools, cos, sin, step, eps=c.norm_eps, q_norm=layer.q_norm, k_norm=layer.k_norm)
        if out is not None:
            out = out.view(rows, c.n_heads, c.head_dim)
            tree_attention(q, *pools, out, step, self.workspace, scale=c.attn_scale, window=window)

    def logits(self, samples: int) -> Tensor:
        """Logits of a step's first logit rows, float32 [samples, vocab]; overwritten by the next `forward`."""
        return self._logits[:samples]

    def _attend(self, index: int, layer: LayerWeights[DeviceLinear], x: Tensor, step: StepArrays) -> None:
        c, rows = self._config, step.tier.rows
        qkv, attended = self._qkv[:rows], self._attended[:rows]
        layer.qkv.normed(x, layer.attn_norm, c.norm_eps, qkv)
        self.attend(index, qkv, attended, step)
        if layer.attn_post_norm is None:
            layer.o.plain(attended, x, x)
        else:
            y = self._y[:rows]
            layer.o.plain(attended, y)
            norm_rows(y, layer.attn_post_norm, x, eps=c.norm_eps, adds=True)

    def _keep_aux(self, layer: int, x: Tensor) -> None:
        width = self._config.hidden_size
        for i, at in enumerate(self.aux_layers):
            if at == layer:
                self.aux_hidden_states[: x.shape[0], i * width : (i + 1) * width].copy_(x)


class DeviceDecoder:
    """Runs a model's forward pass over a `ForwardBatch`, like `specdec.models.decoder.Decoder`.

    A caller that queues more than a forward uses ``network``, ``buffer`` and ``graphs``. ``device`` is a GPU or, for
    tests, the CPU, on which kernels are interpreted. kv_dtype: the KV pool's; None: the rows'.
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
        aux_layers: Sequence[int] = (),
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.config, self.device = model, model.config, device
        self.max_rows, self.max_logit_rows, self.max_positions = max_rows, max_logit_rows, max_positions
        self.settling = 2  # kernels are compiled, then the graph is captured
        self.aux_layers = tuple(aux_layers)
        self.pool = DevicePool(model.config, pages, kv_dtype or model.weights.final_norm.dtype, device)
        tiers = StepTiers(max_entries, max_rows, max_logit_rows, -(-max_positions // PAGE_SIZE))
        self.row_sizes = tiers.rows
        self.network = DeviceNetwork(model, self.pool, tiers.largest, max_positions, aux_layers)
        self.aux_hidden_states = self.network.aux_hidden_states
        self.graphs = GraphCache(device)
        self.buffer = StepBuffer(tiers, device, self.graphs.clear)

    def final_states(self, rows: slice) -> NDArray[np.float64]:
        """See `TargetDecoder.final_states`; waits for the device."""
        return final_norm(self.network.residual[rows], self.model.weights.final_norm, self.config.norm_eps)

    def plan_coarsely(self, coarse: bool | None) -> None:
        """Plan attention in long stretches, in short ones, or, None, in the faster way. Results are the same."""
        self.graphs.clear()  # they hold the former choice
        self.network.workspace = replace(self.network.workspace, coarse=coarse)

    def move_kv(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """See `TargetDecoder.move_kv`; in plain torch, one row after the other."""
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            for pool in (self.pool.k, self.pool.v):
                pool[:, b // PAGE_SIZE, :, b % PAGE_SIZE] = pool[:, a // PAGE_SIZE, :, a % PAGE_SIZE]

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        """Compute every row, write its KV, and return logits float32 [len(logit_rows), vocab] on the device.

        Waits for the device. The logits are valid until the next call.

        Raises:
            ValueError: more rows, logit rows or positions than the buffers hold, or a token id out of range.
        """
        check_batch(self, batch, logit_rows)
        step = self.buffer.load(batch, logit_rows)
        self.graphs.run(("forward", step.tier), partial(self.network.forward, step))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.network.logits(len(logit_rows))


# The self-test
PROMPT_TOKENS = 1300  # more than a coarse plan's block of 1,024 tokens
FIRST_STEP_TOKENS = 1030  # of the prompt, so that the rest attends to a whole block of pages
PIECE_TOKENS = 24  # of a step when the prompt runs in pieces, for other tiles and segment ends
TREE_PARENTS = (-1, 0, 1, 1, 0, 4, 5)  # of the tree after the prompt
FAR_CONTEXT = 3 * 1024  # tokens that a coarse plan reads in whole blocks, more than are summed at once
COMPARED_ROWS = 32  # the logits of one in so many rows of the prompt are compared


def device_self_test(decoder: DeviceDecoder, prompt: int = PROMPT_TOKENS) -> NumericMode:
    """Test that rows do not depend on their batch: "bitwise" if no bit of logits, keys or values differs.

    A prompt in the largest steps and a tree after it, planned coarsely, are compared with the prompt in pieces and each
    node's path one row at a time, planned finely. The tree after a longer context, of whatever the pages hold, is
    compared in both plans. Writes to the pool's pages, which must be unused. Takes about 80 forwards.

    prompt: its tokens, limited to what the pool and the decoder hold twice.
    """
    half = max(decoder.pool.pages // 2, 1)
    prompt = max(1, min(prompt, min(decoder.max_positions, half * PAGE_SIZE) - len(TREE_PARENTS)))
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, decoder.config.vocab_size, (prompt + len(TREE_PARENTS),), generator=generator).tolist()
    pages = -(-len(tokens) // PAGE_SIZE)
    # The second pages are in falling order, so that page ids are tested too.
    here, there = list(range(pages)), list(reversed(range(decoder.pool.pages - pages, decoder.pool.pages)))
    try:
        decoder.plan_coarsely(True)
        at_once = _prompt(decoder, tokens[:prompt], min(FIRST_STEP_TOKENS, decoder.max_rows), decoder.max_rows, here)
        nodes = _rows(decoder, BatchEntry(tokens[prompt:], TREE_PARENTS, prompt, here), range(len(TREE_PARENTS)))
        decoder.plan_coarsely(False)
        in_pieces = _prompt(decoder, tokens[:prompt], 1, PIECE_TOKENS, there)
        alike = here == there or _same_cache(decoder, here, there, prompt)
        paths = _paths(decoder, tokens[prompt:], prompt, there)
        far_finely = _far(decoder, tokens[prompt:])
        decoder.plan_coarsely(True)
        far_coarsely = _far(decoder, tokens[prompt:])
    finally:
        decoder.plan_coarsely(None)
    alike = alike and all(map(torch.equal, at_once + nodes + far_coarsely, in_pieces + paths + far_finely))
    return "bitwise" if alike else "numerical"


def _prompt(decoder: DeviceDecoder, tokens: list[int], first: int, size: int, pages: list[int]) -> list[Tensor]:
    """Logits of some of a prompt's rows, which do not depend on how it is cut."""
    every = max(COMPARED_ROWS, -(-min(FIRST_STEP_TOKENS, decoder.max_rows) // decoder.max_logit_rows))
    done, found = 0, []
    while done < len(tokens):
        chunk = tokens[done : done + min(size if done else first, decoder.max_rows)]
        wanted = [row for row in range(len(chunk)) if (done + row) % every == 0]
        found += _rows(decoder, BatchEntry(chunk, range(-1, len(chunk) - 1), done, pages), wanted)
        done += len(chunk)
    return found


def _paths(decoder: DeviceDecoder, tokens: list[int], prompt: int, pages: list[int]) -> list[Tensor]:
    found = []
    for node in range(len(tokens)):
        path = [node]
        while TREE_PARENTS[path[0]] >= 0:
            path.insert(0, TREE_PARENTS[path[0]])
        for depth, at in enumerate(path):
            (row,) = _rows(decoder, BatchEntry([tokens[at]], [-1], prompt + depth, pages), [0])
        found.append(row)
    return found


def _far(decoder: DeviceDecoder, tokens: list[int]) -> list[Tensor]:
    """Logits of the tree behind `FAR_CONTEXT` tokens; none if the decoder does not hold so many."""
    pages = list(range(FAR_CONTEXT // PAGE_SIZE + 1))
    if len(pages) > decoder.pool.pages or FAR_CONTEXT + len(tokens) > decoder.max_positions:
        return []
    return _rows(decoder, BatchEntry(tokens, TREE_PARENTS, FAR_CONTEXT, pages), range(len(tokens)))


def _rows(decoder: DeviceDecoder, entry: BatchEntry, wanted: Sequence[int]) -> list[Tensor]:
    """A copy of the logits of the rows ``wanted``."""
    return list(decoder.forward(ForwardBatch.build([entry]), wanted).clone())


def _same_cache(decoder: DeviceDecoder, here: list[int], there: list[int], tokens: int) -> bool:
    """Whether the first tokens' keys and values are the same bits in both places; layer by layer, to save memory."""
    pages = -(-tokens // PAGE_SIZE)

    def stretch(layer: Tensor, places: list[int]) -> Tensor:
        return layer.view(torch.uint8)[places[:pages]].transpose(1, 2).flatten(0, 1)[:tokens]

    pools = (pool[layer] for layer in range(decoder.config.n_layers) for pool in (decoder.pool.k, decoder.pool.v))
    return all(torch.equal(stretch(layer, here), stretch(layer, there)) for layer in pools)
