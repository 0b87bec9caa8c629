"""The self-test of a GPU's kernels: each beside plain torch, in every form that a step of the model can launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.kv_cache import pages_for
from specdec.core.tree import MAX_NODES
from specdec.engine.device_verify import POLICIES, TOP, edited
from specdec.errors import KernelError
from specdec.models.decoder import rope_tables
from specdec.models.device_decoder import DeviceDecoder
from specdec.models.device_weights import DeviceLinear, ReferenceLinear
from verify_kernels.backend import AttentionSpec, KvTensors
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.gpu.accept import AcceptResult, accept
from verify_kernels.gpu.attention_workspace import WIDE_ROWS
from verify_kernels.gpu.kernel_launch import FP8
from verify_kernels.gpu.kv_ops import move_kv
from verify_kernels.gpu.linear_plan import plan_launch
from verify_kernels.gpu.norm import norm_rows
from verify_kernels.gpu.triton_sampling import TritonSampling
from verify_kernels.reference.backend import attend_row, rms_norm, write_rows
from verify_kernels.reference.sampling import ReferenceSampling
from verify_kernels.sampling import RowSampling

_LOG = logging.getLogger(__name__)
Pairs = Iterable[tuple[Tensor, Tensor]]  # results of a kernel and of plain torch
HALF_ERROR, ATTENTION_ERROR, FP8_ERROR, EXACT = 2e-2, 4e-2, 0.15, 1e-9  # allowed, over the twin's largest value
ROWS = (1, 24, 48, 96, 192, 384, 768, 1536)  # tiles of every height, partly filled
LONG = 1100  # context of more than a coarse plan's block of 1,024 tokens
COMPARED_ROWS = 64  # of attention, as its twin is slow
ROWS_AT_ONCE = 16  # of results, of which float64 copies are held
FALLBACKS = {"layers": "layers run in plain torch", "verify": "the CPU samples and accepts"}


class KernelCheck(NamedTuple):
    """A kernel on one shape. ``run`` launches it and computes its twin."""

    kernel: str
    shape: str
    run: Callable[[], Pairs]
    error: float = HALF_ERROR

    def fault(self) -> str | None:
        """What is wrong; None if the results agree."""
        try:
            error = max(_difference(got, want.to(got.device)) for got, want in self.run())
        except torch.OutOfMemoryError:
            raise  # it does not show that the kernel is wrong
        except Exception as failure:  # of the compiler or the launch
            return f"GPU kernel {self.kernel} fails on {self.shape}: {type(failure).__name__}: {failure}"
        differs = f"differs from plain torch by {error:.2g} of the largest value"
        return None if error <= self.error else f"GPU kernel {self.kernel} {differs} on {self.shape}"


def check_kernels(decoder: DeviceDecoder) -> set[str]:
    """Test all kernels, small shapes first; returns the families that disagree with plain torch.

    "layers" (norms, gates, linear layers) run in plain torch from then on. For "verify" (sampling, acceptance) the
    caller must use the CPU's verifier. Writes to the pool's pages, which must be unused.

    Raises:
        KernelError: a kernel that nothing replaces disagrees; names its smallest failing shape and the way out.
    """
    failed = set()
    for family, checks in (("forward", _forward_checks), ("layers", _layer_checks), ("verify", _verify_checks)):
        fault = next(filter(None, (check.fault() for check in checks(decoder))), None)
        if fault is None:
            continue
        if family not in FALLBACKS:
            other = "engine.kv_dtype to auto or " if decoder.pool.k.dtype == FP8 else ""
            raise KernelError(f"{fault}; set {other}engine.device to cpu")
        _LOG.warning("%s; %s, which is slow", fault, FALLBACKS[family])
        failed.add(family)
    if "layers" in failed:
        decoder.network.use_reference_layers()
    return failed


def _difference(got: Tensor, want: Tensor) -> float:
    """The largest difference over the twin's largest value; infinite where integers or what is finite differ."""
    if not want.is_floating_point():
        return 0.0 if torch.equal(got.long(), want.long()) else float("inf")
    difference, largest = 0.0, 1e-30
    for ours, twins in zip(got.split(ROWS_AT_ONCE), want.split(ROWS_AT_ONCE), strict=True):
        finite = twins.isfinite()
        if not torch.equal(ours.isfinite(), finite):
            return float("inf")
        wanted = twins.double().where(finite, 0.0)
        difference = max(difference, float((ours.double().where(finite, 0.0) - wanted).abs().max()))
        largest = max(largest, float(wanted.abs().max()))
    return difference / largest


def _random(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(like)


def _forward_checks(decoder: DeviceDecoder) -> Iterator[KernelCheck]:
    """What no other code replaces: post-norms, KV writes and attention."""
    c, norm, pool = decoder.config, decoder.model.weights.final_norm, decoder.pool
    windows = [c.window(i) for i in range(c.n_layers)]

    def post_normed() -> Pairs:
        x, y = _random(norm, 3, c.hidden_size), _random(norm, 3, c.hidden_size) * 2
        want = x.float() + rms_norm(y.float(), norm.float(), c.norm_eps)
        norm_rows(y, norm, x, eps=c.norm_eps, adds=True)
        yield x, want

    if c.post_norms:
        yield KernelCheck("norm_rows", f"3 rows of {c.hidden_size}", post_normed)
    wide = WIDE_ROWS - (-WIDE_ROWS * 64 * c.n_kv_heads // c.n_heads)
    for window in sorted(set(windows)):
        layer, far = windows.index(window), max(LONG, window + 70)
        steps = [[(0, 1)], [(0, 1), (70, 3), (130, 7)], [(far, 7)], [(70, wide)]]  # (context, rows) by sequence
        for step, coarse in [*((step, False) for step in steps), (steps[2], True)]:
            totals = [sum(each) for each in step]
            sizes = len(step), sum(rows for _, rows in step), sum(map(pages_for, totals)), max(totals)
            limits = decoder.buffer.tiers.largest.entries, decoder.max_rows, pool.pages, decoder.max_positions
            if any(size > most for size, most in zip(sizes, limits, strict=True)):
                continue  # no step is so large
            shape = f"{step} (context, rows), head_dim {c.head_dim}, {pool.k.dtype} KV{', coarse' * coarse}"
            run = partial(_attend, decoder, layer, step, coarse)
            yield KernelCheck("write_kv", shape, partial(run, False), FP8_ERROR if pool.k.dtype == FP8 else HALF_ERROR)
            yield KernelCheck("tree_attention", shape, partial(run, True), ATTENTION_ERROR)


def _attend(
    decoder: DeviceDecoder, layer: int, step: Sequence[tuple[int, int]], coarse: bool, attention: bool
) -> Pairs:
    """One layer of a step over random keys and values: q, K and V as written, or ``attention``'s results."""
    c, network, weights = decoder.config, decoder.network, decoder.model.weights.layers[layer]
    window, totals = c.window(layer), [sum(each) for each in step]
    entries, ids = [], list(range(sum(map(pages_for, totals))))
    pools = [pool[: len(ids)] for pool in decoder.pool.layer(layer)]
    for ctx, rows in step:
        root = max(rows - MAX_NODES, 0)  # rows are a chain, of which the last 64 are a tree instead
        parents = [row - 1 if row <= root else root + (row - root - 1) // 2 for row in range(rows)]
        entries.append(BatchEntry([0] * rows, parents, ctx, [ids.pop() for _ in range(pages_for(ctx + rows))]))
    batch = ForwardBatch.build(entries)
    arrays = decoder.buffer.load(batch, [])
    for pool in pools:
        pool.copy_(_random(weights.attn_norm, *pool.shape))
    qkv = _random(weights.attn_norm, arrays.tier.rows, c.q_size + 2 * c.kv_size)
    out = torch.zeros(arrays.tier.rows, c.q_size).to(qkv)
    k, v = (pool.float().cpu() for pool in pools)
    q_norm, k_norm = (None if norm is None else norm.float().cpu() for norm in (weights.q_norm, weights.k_norm))
    spec = AttentionSpec(
        c.n_heads, c.n_kv_heads, c.head_dim, c.attn_scale, c.norm_eps, window, q_norm, k_norm,
        *rope_tables(c.rope, c.head_dim, max(totals), local=c.local(layer)), qkv.float().cpu(),
        out.float().cpu(), KvTensors(k.transpose(-1, -2), v),
    )  # fmt: skip
    twins = write_rows(spec, batch), k, v
    decoder.plan_coarsely(coarse)
    try:
        if attention:
            network.plan(arrays)
        network.attend(layer, qkv, out if attention else None, arrays)
    finally:
        decoder.plan_coarsely(None)
    q = (qkv[: batch.rows, : c.q_size].float() * c.attn_scale).view(twins[0].shape)
    written = [(got.float().cpu(), want) for got, want in zip((q, *pools), twins, strict=True)]
    if not attention:
        return written
    for got, twin in written:
        twin.copy_(got)  # attention reads what was rounded
    chosen = list(range(0, batch.rows, -(-batch.rows // COMPARED_ROWS)))
    return [
        (out[chosen].float(), torch.stack([attend_row(spec, batch, row, twins[0][row]).flatten() for row in chosen]))
    ]


def _layer_checks(decoder: DeviceDecoder) -> Iterator[KernelCheck]:
    """Every tile and partition of the model's own layers, smallest first; then a norm and a gate."""
    c, weights = decoder.config, decoder.model.weights
    head, norm, first = weights.lm_head, weights.final_norm, weights.layers[0]
    seen = set()
    for layer in sorted([head, *(each for one in weights.layers for each in one.linears)], key=lambda x: x.n * x.k):
        for rows in ROWS:
            launch = plan_launch(rows, layer.n, layer.k, layer.kind, layer.group)
            form = (layer.kind, layer.group, launch.order, launch.tile, launch.in_sequence, layer is head)
            if form in seen or rows > (decoder.max_logit_rows if layer is head else decoder.max_rows):
                continue
            seen.add(form)
            x, out = _random(norm, rows, layer.k), _random(norm, rows, layer.n)
            run = partial(_layer, layer, "plain", out.float() if layer is head else out, x)
            if layer.n == c.hidden_size:
                run = partial(run, residual=out)
            shape = (
                f"{rows} x {layer.k} by {layer.n}, {launch.order.split_k} splits{' in sequence' * launch.in_sequence}"
            )
            yield KernelCheck(f"linear {layer.kind}", shape, run, FP8_ERROR if layer.kind == "fp8" else HALF_ERROR)
    x, gate_up, out = (_random(norm, 3, n) for n in (c.hidden_size, 2 * c.intermediate_size, first.gate_up.n))
    normed = partial(_layer, first.gate_up, "normed", out, x, norm, c.norm_eps)
    gated = partial(_layer, first.down, "gated", x, gate_up, "silu" if c.activation == "silu" else "gelu", residual=x)
    for name, run, layer in (("norm_rows", normed, first.gate_up), ("act_mul", gated, first.down)):
        # Float8's quantisation includes both.
        yield KernelCheck(name, f"3 x {layer.k}", run, FP8_ERROR if layer.kind == "fp8" else HALF_ERROR)


def _layer(layer: DeviceLinear, method: str, out: Tensor, *inputs: object, **more: Tensor) -> Pairs:
    outs = out.clone(), out.clone()
    for each, mine in zip((layer, ReferenceLinear(layer)), outs, strict=True):
        getattr(each, method)(*inputs, out=mine, **more)
    return [outs]


def _verify_checks(decoder: DeviceDecoder) -> Iterator[KernelCheck]:
    """Sampling under every policy, and two trees' accepted path 0, 2, 6, whose KV moves."""
    device, pool, vocab = decoder.device, decoder.pool, decoder.config.vocab_size
    logits = 6 * _random(torch.zeros(1, device=device), 2, vocab)
    for policy in POLICIES:
        for row in (RowSampling(policy, PAGE_SIZE), edited(policy, vocab)):
            shape = f"2 rows of {vocab}, {policy}{', edited' * (row.edits is not None)}"
            yield KernelCheck("sampling", shape, partial(_sample, TritonSampling(device), logits, row), EXACT)
    n = min(2, decoder.max_logit_rows // 7, decoder.buffer.tiers.largest.entries, pool.pages)
    first = torch.arange(n, dtype=torch.int32, device=device)[:, None] * PAGE_SIZE + 3
    moves = [first + torch.tensor(slots, dtype=torch.int32, device=device) for slots in ((2, 6), (1, 2))]

    def accepted() -> Pairs:
        batch = ForwardBatch.build([BatchEntry(range(7), (-1, 0, 0, 1, 1, 2, 2), 3, [i]) for i in range(n)])
        step = decoder.buffer.load(batch, range(7 * n), [0] * n, range(0, 7 * n, 7))
        tokens = torch.full((step.tier.samples,), -1, dtype=torch.int32, device=device)
        tokens[: 7 * n] = torch.tensor([2, 0, 6, 0, 0, 0, 9] * n)
        result = AcceptResult.allocate(step.tier.entries, MAX_NODES - 1, device)
        accept(step, step.root_row, step.tokens, tokens, step.sample_start, result, n_pages=pool.pages)
        got = (result.counts[:, None], result.rows[:, :3], result.emitted[:, :3])
        yield torch.cat(got, 1)[:n], torch.tensor([[3, 0, 2, 6, 2, 6, 9]] * n)
        yield from zip((result.move_source[:n, :2], result.move_target[:n, :2]), moves, strict=True)

    def moved() -> Pairs:
        places, wanted = [each[:, :n] for each in (pool.k, pool.v)], []
        for place in places:
            place.copy_(_random(place, *place.shape))
            wanted.append(place.clone().view(torch.uint8))
            wanted[-1][:, :, :, [4, 5]] = wanted[-1][:, :, :, [5, 9]]
        move_kv(pool.k, pool.v, moves[0], moves[1], torch.full((n,), 2, dtype=torch.int32, device=device))
        return zip((place.clone().view(torch.uint8) for place in places), wanted, strict=True)

    if n > 0:
        yield KernelCheck("accept", f"{n} trees of 7 rows", accepted, EXACT)
        yield KernelCheck("move_kv", f"2 moves in each of {n} sequences", moved, EXACT)


def _sample(kernels: TritonSampling, logits: Tensor, row: RowSampling) -> Pairs:
    found, rows = [], [row] * len(logits)
    for each in (kernels, ReferenceSampling()):
        tokens = each.sample(logits, rows)
        arrays = (tokens, *each.children(logits, rows, 4), *each.logprobs(logits, tokens, TOP))
        found.append([torch.from_numpy(array) for array in arrays])
    return zip(*found, strict=True)
