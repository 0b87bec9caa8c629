"""Taps: the residual stream before chosen layers, against transformers, and free of the other rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.models.decoder import Decoder, KvPool
from specdec.models.load import load_model
from tests.kernels.natives import CACHE, native_backend, need_compiler
from tests.models.tiny import load_oracle, make_tiny_model
from verify_kernels.backend import BoundLayers, LayerSpec
from verify_kernels.cpu.library import load_library
from verify_kernels.cpu.native_backend import NativeBackend
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

LAYERS, HIDDEN = 6, 64
TOKENS = [5, 9, 200, 31, 77, 310, 8, 9, 5, 44]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("aux") / "six", num_hidden_layers=LAYERS)


def make_decoder(
    folder: Path, aux_layers: tuple[int, ...], dtype: str = "fp32", backend: NativeBackend | None = None
) -> Decoder:
    model = load_model(str(folder), dtype=dtype, cache_dir=folder.parent / "cache")  # type: ignore[arg-type]
    return Decoder(
        model.config,
        model.weights,
        backend or native_backend(),
        KvPool(model.config, 8),
        max_rows=32,
        max_logit_rows=32,
        max_positions=256,
        aux_layers=aux_layers,
    )


def chain(tokens: list[int], ctx: int, pages: list[int]) -> BatchEntry:
    return BatchEntry(tokens, list(range(-1, len(tokens) - 1)), ctx, pages)


def test_taps_are_the_inputs_of_their_layers(folder: Path) -> None:
    aux_layers = (2, LAYERS // 2, LAYERS - 3, 0)  # 3 twice, and out of order: columns follow these
    decoder = make_decoder(folder, aux_layers)
    decoder.forward(ForwardBatch.build([chain(TOKENS, 0, [3])]), [])
    with torch.no_grad():
        states = load_oracle(folder)(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[at][0] for at in aux_layers], dim=-1)
    assert decoder.aux_hidden_states.shape == (32, len(aux_layers) * HIDDEN)
    torch.testing.assert_close(decoder.aux_hidden_states[: len(TOKENS)], expected, atol=1e-4, rtol=1e-4)
    assert not decoder.aux_hidden_states[len(TOKENS) :].any()


@pytest.mark.parametrize("dtype", ["int8", "bf16", "fp32"])
def test_a_rows_features_do_not_depend_on_its_batch(folder: Path, dtype: str) -> None:
    decoder = make_decoder(folder, (2, 3, 4), dtype)
    alone = []
    for i, token in enumerate(TOKENS):
        decoder.forward(ForwardBatch.build([chain([token], i, [1])]), [])
        alone.append(decoder.aux_hidden_states[0].clone())
    others = chain([7, 7, 40, 41], 0, [2])
    decoder.forward(ForwardBatch.build([others, chain(TOKENS, 0, [5])]), [0])
    assert torch.equal(decoder.aux_hidden_states[4 : 4 + len(TOKENS)], torch.stack(alone))


def test_taps_change_no_logits(folder: Path) -> None:
    batch = ForwardBatch.build([chain(TOKENS, 0, [3])])
    plain = make_decoder(folder, ()).forward(batch, range(len(TOKENS))).clone()
    assert torch.equal(make_decoder(folder, (1, 5)).forward(batch, range(len(TOKENS))), plain)


class CountingBackend(NativeBackend):
    """Counts the calls of bound layers."""

    calls = 0

    def bind(self, *layers: LayerSpec) -> BoundLayers:
        bound = super().bind(*layers)

        def op(rows: int, batch: ForwardBatch | None = None) -> None:
            self.calls += 1
            bound(rows, batch)

        return op


@pytest.mark.parametrize(("aux_layers", "calls"), [((), 2), ((0,), 2), ((3, 1, 3), 4)])
def test_layers_between_taps_run_in_one_call(folder: Path, aux_layers: tuple[int, ...], calls: int) -> None:
    """Each call waits for the interpreter if another thread computes in Python."""
    need_compiler()
    backend = CountingBackend(load_library(CACHE), 2)
    make_decoder(folder, aux_layers, backend=backend).forward(ForwardBatch.build([chain(TOKENS, 0, [3])]), [0])
    assert backend.calls == calls
