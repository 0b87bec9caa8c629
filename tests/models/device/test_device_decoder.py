"""A model on the device against the same model on the CPU: logits, hidden states, bits in any batch, bad batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.models.config import RopeConfig
from specdec.models.device_decoder import DeviceDecoder
from tests.models.device.small import SLOW_INTERPRETED, device_decoder, host_decoder, shape
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

GEMMA: dict[str, Any] = {
    "qkv_bias": False, "qk_norm": True, "post_norms": True, "sliding_window": 24, "local_layers": (True, False),
    "activation": "gelu_tanh", "embed_scale": 8.0, "tie_embeddings": True, "rope": RopeConfig(1e6, 1e4),
}  # fmt: skip
SMOLLM3: dict[str, Any] = {"local_layers": (True, False), "rope": RopeConfig(1e4, local_rotates=False)}
TREE = [-1, 0, 1, 2, 1, 0, 5, 5]
PROMPT = torch.randint(0, 384, (100,), generator=torch.Generator().manual_seed(3)).tolist()


def chain(tokens: list[int], ctx: int, pages: list[int]) -> BatchEntry:
    return BatchEntry(tokens, list(range(-1, len(tokens) - 1)), ctx, pages)


def steps() -> list[tuple[ForwardBatch, list[int]]]:
    """Prompts in chunks, then trees in the same batch as a chunk and a decode."""
    tree = BatchEntry(PROMPT[:8], TREE, 70, [3, 9])
    return [
        (ForwardBatch.build([chain(PROMPT[:64], 0, [3])]), [63]),
        (ForwardBatch.build([chain(PROMPT[64:70], 64, [3, 9]), chain(PROMPT[:5], 0, [1])]), [5, 10]),
        (ForwardBatch.build([tree, chain(PROMPT[5:10], 5, [1]), chain([7], 0, [11])]), [*range(8), 12, 13]),
    ]


def run(decoder: Any) -> list[Tensor]:
    return [decoder.forward(batch, rows).clone().cpu() for batch, rows in steps()]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=SLOW_INTERPRETED, id="qwen"),
        pytest.param(GEMMA, id="gemma"),
        pytest.param(SMOLLM3, id="smollm3"),
        pytest.param({"rope": RopeConfig(1e4, rotated=12)}, marks=SLOW_INTERPRETED, id="phi3"),
        pytest.param({"embed_scale": 12 / 0.22, "norm_eps": 1e-5 / 0.22**2}, marks=SLOW_INTERPRETED, id="granite"),
    ],
)
def test_logits_equal_the_cpus(changes: dict[str, Any]) -> None:
    config = shape(**changes)
    aux_layers = (0, 1)
    device, host = device_decoder(config, aux_layers=aux_layers), host_decoder(config, aux_layers=aux_layers)
    for got, expected in zip(run(device), run(host), strict=True):
        assert torch.linalg.norm(got - expected) <= 2e-4 * torch.linalg.norm(expected)
    torch.testing.assert_close(
        device.aux_hidden_states[:14].float().cpu(), host.aux_hidden_states[:14], atol=2e-3, rtol=2e-3
    )


@pytest.mark.parametrize(("dtype", "error"), [("fp16", 5e-3), ("fp8", 0.15)])
def test_smaller_types_are_close(dtype: str, error: float) -> None:
    if dtype == "fp8" and not torch.cuda.is_available():
        pytest.skip("its rows are bfloat16, whose products the interpreter gets wrong")
    config = shape(n_layers=1)
    for got, expected in zip(run(device_decoder(config, dtype)), run(host_decoder(config)), strict=True):
        assert torch.linalg.norm(got - expected) <= error * torch.linalg.norm(expected)


def feed(decoder: DeviceDecoder, tokens: list[int], sizes: list[int], pages: list[int]) -> list[Tensor]:
    """Logits of every position, in chunks of the given sizes."""
    done, out = 0, []
    for size in sizes:
        batch = ForwardBatch.build([chain(tokens[done : done + size], done, pages)])
        out += decoder.forward(batch, range(size)).clone()
        done += size
    return out


@pytest.mark.parametrize("length", [12, pytest.param(66, marks=SLOW_INTERPRETED)])
def test_batch_and_tier_change_no_bit(length: int) -> None:
    decoder = device_decoder(shape(n_layers=1), "fp16")
    at_once = feed(decoder, PROMPT[:length], [length], [2, 4])
    in_chunks = feed(decoder, PROMPT[:length], [3, 1, 5, length - 9], [5, 6])
    assert all(map(torch.equal, at_once, in_chunks))
    parents = [-1, 0, 0, 1, 2]
    tree = BatchEntry(PROMPT[:5], parents, length, [2, 4])
    together = decoder.forward(ForwardBatch.build([chain(PROMPT[:9], 0, [8]), tree]), range(9, 14)).clone()
    for node, row in enumerate(together):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        for depth, at in enumerate(path):
            alone = decoder.forward(ForwardBatch.build([chain([PROMPT[at]], length + depth, [5, 6])]), [0])
        assert torch.equal(alone[0], row), node


def test_a_float8_cache_changes_numbers_little() -> None:
    config = shape(n_layers=1)
    decoders = [device_decoder(config, "fp16", **kv) for kv in ({}, {"kv_dtype": torch.float8_e4m3fn})]
    assert decoders[1].pool.k.dtype == torch.float8_e4m3fn
    assert 2 * decoders[1].pool.k.nbytes == decoders[0].pool.k.nbytes
    batches = [
        ForwardBatch.build([chain(PROMPT[:12], 0, [3])]),
        ForwardBatch.build([BatchEntry(PROMPT[:3], [-1, 0, 0], 12, [3])]),
    ]
    for batch in batches:
        wide, small = (decoder.forward(batch, range(batch.rows)).clone() for decoder in decoders)
        assert 0 < torch.linalg.norm(small - wide) <= 0.1 * torch.linalg.norm(wide)


def test_bad_batches_are_rejected() -> None:
    decoder = device_decoder(shape(n_layers=1))

    def refused(word: str, entry: BatchEntry, logit_rows: list[int]) -> None:
        with pytest.raises(ValueError, match=word):
            decoder.forward(ForwardBatch.build([entry]), logit_rows)

    refused("tokens", chain([384], 0, [0]), [])
    refused("page_table", chain([1], 0, [12]), [])
    refused("position", chain([1], 320, [0, 1, 2, 3, 4, 5]), [])
    refused("rows", chain([1] * 97, 0, [0, 1]), [])
    refused("logit_rows", chain([1], 0, [0]), [1])
    with pytest.raises(ValueError, match="entries"):
        decoder.forward(ForwardBatch.build([chain([1], 0, [i]) for i in range(5)]), [])
