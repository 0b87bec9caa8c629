"""Loading EAGLE-3 checkpoints: every format, and clear errors for unsupported ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft.head_checkpoint import HeadModel, is_head, load_head
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.config import ModelConfig, RopeConfig
from tests.draft.eagle3_checkpoint import HIDDEN, head_config, head_tensors, write_head
from verify_kernels.packed_weights import unpack_linear

VOCAB, DRAFT_VOCAB, TARGET_HIDDEN, LAYERS = 200, 70, 64, 8
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def target(hidden: int = TARGET_HIDDEN) -> ModelConfig:
    return ModelConfig("llama", VOCAB, hidden, LAYERS, 4, 2, 16, 96, 512, 1e-6, RopeConfig(10000.0), 0.25)


def load(folder: Path, hidden: int = TARGET_HIDDEN) -> HeadModel:
    return load_head(folder, dtype="fp32", target=target(hidden), target_embed=torch.ones(VOCAB, hidden))


def changed(tmp_path: Path, change: Change, draft_vocab: int = DRAFT_VOCAB) -> Path:
    config, tensors = head_config(VOCAB, draft_vocab), head_tensors(TARGET_HIDDEN, VOCAB, draft_vocab)
    change(config, tensors)
    return write_head(tmp_path / "head", config, tensors)


def check_same(head: HeadModel, tensors: dict[str, Tensor]) -> None:
    layer = "midlayer."
    qkv = torch.cat([tensors[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([tensors[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    (found,) = head.layers
    assert torch.equal(unpack_linear(found.qkv), qkv)
    assert torch.equal(unpack_linear(found.gate_up), gate_up)
    assert torch.equal(unpack_linear(head.fc), tensors["fc.weight"])
    assert torch.equal(unpack_linear(found.o), tensors[layer + "self_attn.o_proj.weight"])
    assert torch.equal(unpack_linear(found.down), tensors[layer + "mlp.down_proj.weight"])
    assert torch.equal(unpack_linear(head.lm_head), tensors["lm_head.weight"])
    assert torch.equal(head.embed, tensors["embed_tokens.weight"])
    assert torch.equal(head.embed_norm, tensors[layer + "input_layernorm.weight"])
    assert torch.equal(found.attn_norm, tensors[layer + "hidden_norm.weight"])
    assert torch.equal(found.mlp_norm, tensors[layer + "post_attention_layernorm.weight"])
    assert torch.equal(head.final_norm, tensors["norm.weight"])


@pytest.mark.parametrize("form", ["safetensors", "sharded", "bin"])
def test_a_digest_distinguishes_heads_and_types(form: str, tmp_path: Path) -> None:
    tensors = head_tensors(TARGET_HIDDEN, VOCAB, DRAFT_VOCAB)
    folder = write_head(tmp_path / "head", head_config(VOCAB, DRAFT_VOCAB), tensors, form)
    embed = torch.ones(VOCAB, TARGET_HIDDEN)
    rounded = load_head(folder, dtype="int8", target=target(), target_embed=embed)
    other = load(
        write_head(
            tmp_path / "other",
            head_config(VOCAB, DRAFT_VOCAB),
            tensors | {"norm.weight": 2 * tensors["norm.weight"]},
            form,
        )
    )
    assert load(folder).digest == load(folder).digest
    assert len({load(folder).digest, rounded.digest, other.digest}) == 3


@pytest.mark.parametrize("form", ["safetensors", "sharded", "bin"])
def test_every_form_gives_the_same_head(form: str, tmp_path: Path) -> None:
    tensors = head_tensors(TARGET_HIDDEN, VOCAB, DRAFT_VOCAB)
    head = load(write_head(tmp_path / "head", head_config(VOCAB, DRAFT_VOCAB), tensors, form))
    check_same(head, tensors)
    assert head.config.aux_layers == (2, 4, 5)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == (torch.arange(DRAFT_VOCAB) + tensors["d2t"]).tolist()


def test_vllm_names_and_the_speculators_config(tmp_path: Path) -> None:
    tensors = head_tensors(TARGET_HIDDEN, VOCAB, DRAFT_VOCAB)
    renamed = {
        name.replace("midlayer.", "model.layers.0.").replace("fc.", "model.fc."): value
        for name, value in tensors.items()
    }
    config = {
        "speculators_model_type": "eagle3",
        "norm_before_residual": True,
        "draft_vocab_size": DRAFT_VOCAB,
        "transformer_layer_config": head_config(VOCAB, DRAFT_VOCAB),
    }
    head = load(write_head(tmp_path / "head", config, renamed))
    check_same(head, tensors)
    assert head.config.residual_normed


@pytest.mark.parametrize(
    ("config", "aux_layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, (1, 3, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, (2, 4, 7)),  # outputs: SGLang's count
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (2, 4, 5)),  # the usual three
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 4, 5)),
    ],
)
def test_aux_layers_can_be_named(config: dict[str, Any], aux_layers: tuple[int, ...], tmp_path: Path) -> None:
    assert load(changed(tmp_path, lambda c, t: c.update(config))).config.aux_layers == aux_layers


def test_without_an_embedding_the_targets_is_used(tmp_path: Path) -> None:
    tensors = head_tensors(HIDDEN, VOCAB, VOCAB)
    del tensors["embed_tokens.weight"]
    folder = write_head(tmp_path / "head", head_config(VOCAB, VOCAB), tensors)
    head = load(folder, HIDDEN)
    assert torch.equal(head.embed, torch.ones(VOCAB, HIDDEN))
    assert head.target_ids is None


def test_ids_from_t2d_alone(tmp_path: Path) -> None:
    expected = load(changed(tmp_path / "both", lambda c, t: None)).target_ids
    assert expected is not None
    alone = load(changed(tmp_path / "one", _drop("d2t"))).target_ids
    assert alone is not None
    assert torch.equal(alone, expected)


def _drop(name: str) -> Change:
    return lambda c, t: t.__delitem__(name)


def _set(name: str, value: Tensor) -> Change:
    return lambda c, t: t.update({name: value})


def _rename(name: str, kind: str) -> Change:
    return lambda c, t: t.update({name.replace("weight", kind): t.pop(name)})


def _config(**fields: Any) -> Change:
    return lambda c, t: c.update(fields)


LAYER = "midlayer."
REFUSED: list[tuple[Change, type[ModelError], str]] = [
    (_drop("fc.weight"), ModelError, r"fc\.weight is missing"),
    (_drop("lm_head.weight"), ModelError, r"lm_head\.weight is missing"),
    (_drop(LAYER + "mlp.up_proj.weight"), ModelError, r"mlp\.up_proj\.weight is missing"),
    (_drop(LAYER + "hidden_norm.weight"), UnsupportedModelError, r"hidden_norm\.weight is missing, .* EAGLE-3"),
    (_drop("embed_tokens.weight"), ModelError, r"embed_tokens\.weight is missing, .* 64 wide"),
    (_set("fc.weight", torch.zeros(HIDDEN, 3 * 32)), ModelError, r"fc\.weight .* hidden size 64"),
    (_set("norm.weight", torch.zeros(7)), ModelError, r"norm\.weight has shape \[7\]"),
    (_set("norm.weight", torch.full((HIDDEN,), torch.nan)), ModelError, r"norm\.weight holds .* no finite"),
    (_set("fc.bias", torch.zeros(7)), ModelError, r"fc\.bias has shape \[7\]"),
    (_set("embed_tokens.weight", torch.zeros(9, HIDDEN)), ModelError, r"embed_tokens\.weight has shape \[9, 48\]"),
    (_set("embed_tokens.weight", torch.zeros(9)), ModelError, r"embed_tokens\.weight has shape \[9\]"),
    (_set("lm_head.weight", torch.tensor(1.0)), ModelError, r"lm_head\.weight has shape \[\]"),
    (_set("d2t", torch.full((DRAFT_VOCAB,), VOCAB)), ModelError, r"d2t leads to token ids outside"),
    (_set("d2t", torch.full((DRAFT_VOCAB,), -1)), ModelError, r"d2t leads to token ids outside"),
    (_set("d2t", torch.zeros(3, dtype=torch.long)), ModelError, r"d2t has shape \[3\]"),
    (_set("d2t", torch.zeros(DRAFT_VOCAB)), ModelError, r"d2t has type torch.float32"),
    (_set("fc.weight", torch.zeros(HIDDEN, 3 * 64, dtype=torch.int8)), UnsupportedModelError, r"fc\.weight has type"),
    (_set("layers.1.mlp.up_proj.weight", torch.zeros(2)), UnsupportedModelError, r"layers\.1\.mlp\.up_proj"),
    (_config(num_hidden_layers=2), ModelError, r"layers\.1\.\S+ is missing"),
    (
        _rename(LAYER + "self_attn.q_proj.weight", "qweight"),
        UnsupportedModelError,
        r"q_proj\.qweight belongs to no layer",
    ),
    (
        _rename(LAYER + "mlp.gate_proj.weight", "experts"),
        UnsupportedModelError,
        r"gate_proj\.experts belongs to no layer",
    ),
    (_set("additional_layers.0.hidden_norm.weight", torch.zeros(HIDDEN)), UnsupportedModelError, "additional_layers"),
    (_config(speculators_model_type="peagle"), UnsupportedModelError, "speculators_model_type 'peagle'"),
    (_config(parallel_drafting=True), UnsupportedModelError, "'parallel_drafting'"),
    (_config(layer_types=["sliding_attention"]), UnsupportedModelError, "'layer_types'"),
    (_config(fc_norm=True), ModelError, r"fc_norm\.0\.weight is missing"),
    (_config(norm_before_fc=True), ModelError, r"input_norm\.weight is missing"),
    (_set("fc_norm.0.weight", torch.zeros(64)), UnsupportedModelError, r"fc_norm\.0\.weight belongs to no layer"),
    (_set(LAYER + "self_attn.k_norm.weight", torch.ones(16)), ModelError, r"self_attn\.q_norm\.weight is missing"),
    (lambda c, t: (t.pop("d2t"), t.pop("t2d")), ModelError, r"d2t is missing, .* 'draft_vocab_size' 70"),
    (_config(specdec={"acceptance": [0.7, 1.2]}), ModelError, r"'specdec\.acceptance' must be a list"),
    (_config(model_type="deepseek_v3"), UnsupportedModelError, "model_type 'deepseek_v3'"),
    (_config(eagle_config={"use_aux_hidden_state": False}), UnsupportedModelError, "use_aux_hidden_state"),
    (_config(head_dim=15), UnsupportedModelError, "heads of 15"),
    (_config(hidden_size="x"), ModelError, "'hidden_size'"),
    (_config(eagle_aux_hidden_state_layer_ids=[2, 4, LAYERS]), ModelError, r"\[2, 4, 8\], the target has 8 layers"),
    (_config(eagle_aux_hidden_state_layer_ids=["2"]), ModelError, "must be a list of layer numbers"),
    (_config(eagle_config="x"), ModelError, r"config\.json: holds a value of the wrong kind"),
    (_config(transformer_layer_config=None), ModelError, r"config\.json: holds a value of the wrong kind .*'NoneType'"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[case[2] for case in REFUSED])
def test_errors_name_the_cause(change: Change, error: type[ModelError], message: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, change)
    with pytest.raises(error, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_a_full_head_of_another_vocabulary_is_rejected(tmp_path: Path) -> None:
    tensors = head_tensors(TARGET_HIDDEN, VOCAB + 1, VOCAB + 1)
    with pytest.raises(ModelError, match=r"lm_head\.weight leads to token ids outside .* 200"):
        load(write_head(tmp_path / "head", head_config(VOCAB + 1, VOCAB + 1), tensors))


def test_damaged_files_are_rejected(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda c, t: None)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated or corrupt"):
        load(folder)
    weights.unlink()
    with pytest.raises(ModelError, match="weights"):
        load(folder)
    for data in (b"PK nothing", b"\x80\x02h\x05.", b"\x80\x02s.", b"\x80\x02}N)b."):
        (folder / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(ModelError, match=r"pytorch_model\.bin: truncated, corrupt or not plain"):
            load(folder)
    for stored in ([torch.zeros(1)], {1: torch.zeros(1)}):
        torch.save(stored, folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match="dictionary of tensors"):
            load(folder)


def test_what_is_a_head(tmp_path: Path) -> None:
    assert is_head(changed(tmp_path, lambda c, t: None))
    assert not is_head("~nobody-here/model")


class _Payload:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("never"),))


def test_a_pickle_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = changed(tmp_path, lambda c, t: None)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": _Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="not plain tensors"):
        load(folder)
    assert not (tmp_path / "never").exists()
