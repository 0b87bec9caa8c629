"""The feature head against the published equations: committed prefix, drafted chain, tree, reduced vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft.head import HeadNetwork
from draft.head_checkpoint import load_head
from specdec.config import Dtype
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.decoder import KvPool
from tests.draft.eagle3_checkpoint import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    head_config,
    head_tensors,
    write_head,
)
from tests.draft.eagle3_reference import Eagle3Reference, Slot
from tests.kernels.natives import native_backend
from verify_kernels.backend import Backend
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.reference.backend import ReferenceBackend

VOCAB, TARGET_HIDDEN, LENGTH = 200, 64, 90  # more than a page
PAGES = [4, 1, 6]
TREE_TOKENS = [-1, 11, 12, 13, 14, 15, 16]
TREE_PARENTS = [-1, 0, 0, 1, 1, 2, 3]


def target_config(hidden: int = TARGET_HIDDEN, layers: int = 8, vocab: int = VOCAB) -> ModelConfig:
    rope = RopeConfig(10000.0)
    return ModelConfig("llama", vocab, hidden, layers, 4, 2, 16, 96, 512, 1e-6, rope, 0.25)


def make_network(folder: Path, backend: Backend, dtype: Dtype = "fp32") -> HeadNetwork:
    head = load_head(folder, dtype=dtype, target=target_config(), target_embed=torch.zeros(VOCAB, TARGET_HIDDEN))
    return HeadNetwork(head, backend, KvPool(head.config.model, 8), max_rows=64, max_positions=256)


def sample(seed: int = 1) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=generator).tolist()
    return tokens, torch.randn(LENGTH, 3 * TARGET_HIDDEN, generator=generator)


def run_committed(network: HeadNetwork, tokens: list[int], features: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Logits and z of all slots, fed in chunks of ``size``."""
    logits, zs = [], []
    for low in range(0, len(tokens) - 1, size):
        fed = tokens[low + 1 : low + 1 + size]
        batch = ForwardBatch.build([BatchEntry(fed, list(range(-1, len(fed) - 1)), low, PAGES)])
        out, z = network.forward(batch, network.fuse(features[low : low + len(fed)]).clone(), range(len(fed)))
        logits.append(out.clone())
        zs.append(z.clone())
    return torch.cat(logits), torch.cat(zs)


def run_tree(network: HeadNetwork, tokens: list[int], features: Tensor) -> list[Tensor]:
    """Logits of every node of the tree, each fed with its parent's output, a level at a time."""
    hidden = [network.fuse(features[len(tokens) - 2][None])[0].clone()]
    nodes = [tokens[-1], *TREE_TOKENS[1:]]
    logits: dict[int, Tensor] = {}
    while len(logits) < len(nodes):
        n, low = len(hidden), len(tokens) - 2
        batch = ForwardBatch.build([BatchEntry(nodes[:n], TREE_PARENTS[:n], low, PAGES)])
        out, z = network.forward(batch, torch.stack(hidden), range(n))
        logits = {node: out[node].clone() for node in range(n)}
        hidden += [z[TREE_PARENTS[node]].clone() for node in range(n, len(nodes)) if TREE_PARENTS[node] < n]
    return [logits[node] for node in range(len(nodes))]


def full(slot: Slot, tensors: dict[str, Tensor]) -> Tensor:
    """The reference's logits over the target's vocabulary."""
    out = torch.full((VOCAB,), -1e31)
    for draft_id, value in enumerate(slot.logits.tolist()):
        out[draft_id + (int(tensors["d2t"][draft_id]) if "d2t" in tensors else 0)] = value
    return out


def check_equations(network: HeadNetwork, tensors: dict[str, Tensor], reference: Eagle3Reference) -> None:
    """Compare a committed text, and a tree behind it, with the reference."""
    tokens, features = sample()
    slots = reference.committed(tokens, features)
    logits, z = run_committed(network, tokens, features, 40)
    torch.testing.assert_close(logits, torch.stack([full(s, tensors) for s in slots]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(z, torch.stack([s.z for s in slots]), atol=1e-4, rtol=1e-4)
    nodes = reference.tree(slots, TREE_TOKENS, TREE_PARENTS)
    got = torch.stack(run_tree(network, tokens, features))
    torch.testing.assert_close(got, torch.stack([full(s, tensors) for s in nodes]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("draft_vocab", [VOCAB, 70])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("backend_name", ["native", "reference"])
def test_logits_follow_the_equations(draft_vocab: int, normed: bool, backend_name: str, tmp_path: Path) -> None:
    backend = native_backend() if backend_name == "native" else ReferenceBackend(1)
    tensors = head_tensors(TARGET_HIDDEN, VOCAB, draft_vocab)
    config = head_config(VOCAB, draft_vocab, norm_before_residual=normed)
    network = make_network(write_head(tmp_path / "head", config, tensors), backend)
    check_equations(network, tensors, Eagle3Reference(tensors, normed))


def _more_tensors(names: dict[str, int | tuple[int, int]]) -> dict[str, Tensor]:
    """Random norms (a width) and matrices (a shape)."""
    generator = torch.Generator().manual_seed(3)
    return {
        name + ".weight": 1 + 0.2 * torch.randn(shape, generator=generator)
        if isinstance(shape, int)
        else torch.randn(shape, generator=generator) * (1.5 / shape[1] ** 0.5)
        for name, shape in names.items()
    }


def _plain_layer(at: int) -> dict[str, int | tuple[int, int]]:
    attention, mlp, q, kv = f"layers.{at}.self_attn.", f"layers.{at}.mlp.", HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, int | tuple[int, int]] = {
        f"layers.{at}.input_layernorm": HIDDEN,
        f"layers.{at}.post_attention_layernorm": HIDDEN,
        attention + "q_proj": (q, HIDDEN),
        attention + "k_proj": (kv, HIDDEN),
        attention + "v_proj": (kv, HIDDEN),
        attention + "o_proj": (HIDDEN, q),
    }
    return shapes | {mlp + "gate_proj": (FFN, HIDDEN), mlp + "up_proj": (FFN, HIDDEN), mlp + "down_proj": (HIDDEN, FFN)}


FC_NORM: dict[str, int | tuple[int, int]] = {f"fc_norm.{at}": TARGET_HIDDEN for at in range(3)}
QK_NORM: dict[str, int | tuple[int, int]] = {f"midlayer.self_attn.{part}_norm": HEAD_DIM for part in "qk"}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, int | tuple[int, int]]]] = {  # config fields, further tensors
    "eagle": ({}, {}),
    "specforge 3.1": ({"fc_norm": True, "norm_output": True}, FC_NORM),
    "vllm, two layers": ({"num_hidden_layers": 2, "norm_before_fc": True}, _plain_layer(1) | {"input_norm": 192}),
    "speculators, qwen3": (
        {"speculators_model_type": "eagle3", "norm_before_residual": True, "norm_output": True, "fc_norm": True},
        FC_NORM | QK_NORM,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_follow_their_equations(layout: str, tmp_path: Path) -> None:
    fields, names = LAYOUTS[layout]
    tensors = head_tensors(TARGET_HIDDEN, VOCAB, 70) | _more_tensors(names)
    config, stored = head_config(VOCAB, 70, **fields), dict(tensors)
    if layout.startswith(("vllm", "speculators")):
        stored = {"model." + name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    if "speculators" in layout:
        inner = {name: value for name, value in config.items() if name not in {*fields, "draft_vocab_size"}}
        config = {**fields, "draft_vocab_size": 70, "transformer_layer_config": inner | {"model_type": "qwen3"}}
    network = make_network(write_head(tmp_path / "head", config, stored), native_backend())
    reference = Eagle3Reference(tensors, bool(fields.get("norm_before_residual")), bool(fields.get("norm_output")))
    check_equations(network, tensors, reference)


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_smaller_types_are_close(dtype: Dtype, tmp_path: Path) -> None:
    tensors = head_tensors(TARGET_HIDDEN, VOCAB, VOCAB)
    network = make_network(write_head(tmp_path / "head", head_config(VOCAB, VOCAB), tensors), native_backend(), dtype)
    tokens, features = sample()
    expected = torch.stack([s.logits for s in Eagle3Reference(tensors).committed(tokens, features)])
    got, _ = run_committed(network, tokens, features, 40)
    assert torch.linalg.norm(got - expected) / torch.linalg.norm(expected) < 0.05


def test_biases_are_added(tmp_path: Path) -> None:
    tensors = head_tensors(TARGET_HIDDEN, VOCAB, VOCAB)
    generator = torch.Generator().manual_seed(9)
    for name in ("fc", *(f"midlayer.self_attn.{part}_proj" for part in "kvo")):  # not q: one missing bias is zero
        tensors[name + ".bias"] = torch.randn(tensors[name + ".weight"].shape[0], generator=generator)
    network = make_network(write_head(tmp_path / "head", head_config(VOCAB, VOCAB), tensors), native_backend())
    tokens, features = sample()
    expected = torch.stack([slot.logits for slot in Eagle3Reference(tensors).committed(tokens[:20], features)])
    got, _ = run_committed(network, tokens[:20], features, 8)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_bad_batches_are_rejected(tmp_path: Path) -> None:
    tensors = head_tensors(TARGET_HIDDEN, VOCAB, VOCAB)
    network = make_network(write_head(tmp_path / "head", head_config(VOCAB, VOCAB), tensors), native_backend())

    def run(tokens: list[int], ctx: int, pages: list[int], chosen: list[int]) -> None:
        batch = ForwardBatch.build([BatchEntry(tokens, list(range(-1, len(tokens) - 1)), ctx, pages)])
        network.forward(batch, torch.zeros(len(tokens), network.head.config.model.hidden_size), chosen)

    with pytest.raises(ValueError, match="tokens"):
        run([VOCAB], 0, [0], [])
    with pytest.raises(ValueError, match="page_table"):
        run([1], 0, [8], [])
    with pytest.raises(ValueError, match="position"):
        run([1], 256, [0, 1, 2, 3, 4], [])
    with pytest.raises(ValueError, match="rows"):
        run([1] * 65, 0, [0, 1], [])
    with pytest.raises(ValueError, match="logit_rows"):
        run([1], 0, [0], [1])
    with pytest.raises(ValueError, match="features"):
        network.fuse(torch.zeros(1, 5))
