"""LoRA adapters, beside PEFT's own merge."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from peft import PeftModel
from safetensors.torch import load_file, save_file

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.load import HostModel, load_model
from specdec.models.pack import PackedCache
from specdec.models.progress import silent
from specdec.models.resolve import is_here, load_tokenizer, resolve
from tests.models.oracle_weights import differences
from tests.models.tiny import load_oracle, make_tiny_model
from tests.models.tiny_adapter import ALL, make_adapter
from tests.models.tiny_gguf import write_tiny_gguf

WEIGHTS = "adapter_model.safetensors"


def merged(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(load_oracle(base), adapter).merge_and_unload()


def change(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def change_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def load(ref: Path | str, tmp_path: Path, dtype: Any = "fp32") -> HostModel:
    return load_model(str(ref), dtype=dtype, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 2}}],
    ids=["all", "rslora", "some"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_weights_equal_those_that_peft_merges(
    family: str, settings: dict[str, Any], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny(family)
    adapter = make_adapter(base, tmp_path / "tuned", **settings)
    model = load(adapter, tmp_path)
    assert model.name == "tuned"
    oracle = merged(base, adapter)
    assert differences(model.weights, oracle, tolerance=1e-5) == []
    assert len(differences(model.weights, load_oracle(base), tolerance=1e-5)) > 2


FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def test_fused_matrices(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(tiny("phi3"), tmp_path / "tuned", target_modules=FUSED)
    assert differences(load(adapter, tmp_path).weights, merged(tiny("phi3"), adapter), tolerance=1e-5) == []


@pytest.mark.parametrize(("family", "modules"), [("llama", ALL), ("qwen3", ALL), ("phi3", FUSED)])
def test_over_a_gguf_file(family: str, modules: list[str], tiny: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(tiny(family), tmp_path / "tuned", target_modules=modules)
    write_tiny_gguf(tiny(family), tmp_path / "base.gguf")
    change(adapter, base_model_name_or_path=str(tmp_path / "base.gguf"))
    assert differences(load(adapter, tmp_path).weights, merged(tiny(family), adapter), tolerance=1e-5) == []


def test_matrices_without_factors_keep_their_blocks(tmp_path: Path) -> None:
    base = make_tiny_model("llama", tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "tuned", target_modules=["q_proj"])
    write_tiny_gguf(base, tmp_path / "base.gguf", Kind.Q4_0)
    change(adapter, base_model_name_or_path=str(tmp_path / "base.gguf"))
    qkv, o = (getattr(load(adapter, tmp_path, "auto").weights.layers[0], name) for name in ("qkv", "o"))
    assert [part.kind for part in qkv.parts] == ["int8", "q4_0"]
    assert o.kind == "q4_0"


def test_experts(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A layer's experts as modules of their own, as PEFT saves them for models in whose code they are."""
    base = tiny("qwen3_moe")
    adapter = make_adapter(base, tmp_path / "tuned", target_modules=["q_proj"])
    a, b = torch.randn(2, 64), torch.randn(48, 2)
    name = "base_model.model.model.layers.1.mlp.experts.5.gate_proj.lora_{}.weight"
    change_tensors(adapter, lambda tensors: tensors.update({name.format("A"): a, name.format("B"): b}))
    changed, plain = (resolve(str(each), tmp_path, silent).open() for each in (adapter, base))
    role = "layers.1.experts.5.gate"
    torch.testing.assert_close(changed.rows(role, 7, 20), plain.rows(role, 7, 20) + 6 * (b @ a)[7:20])
    assert torch.equal(changed.rows("layers.1.experts.4.gate", 0, 48), plain.rows("layers.1.experts.4.gate", 0, 48))


@pytest.mark.parametrize("module", ["mlp.experts.99.gate_proj", "self_attn.qkv_proj"])
def test_factors_of_matrices_that_the_base_lacks(module: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny("qwen3_moe")
    write_tiny_gguf(base, tmp_path / "base.gguf")
    adapter = make_adapter(base, tmp_path / "tuned", target_modules=["q_proj"])
    rows = 48 if "experts" in module else 256
    new = {f"base_model.model.model.layers.1.{module}.lora_{f}.weight": torch.zeros(shape)
           for f, shape in (("A", (2, 64)), ("B", (rows, 2)))}  # fmt: skip
    change_tensors(adapter, lambda tensors: tensors.update(new))
    for place in (base, tmp_path / "base.gguf"):
        change(adapter, base_model_name_or_path=str(place))
        with pytest.raises(ModelError, match=r"which does not fit .*, where it is missing"):
            load(adapter, tmp_path)


def test_a_hub_id_and_a_changed_adapter(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that were packed for another state of the adapter are not used."""
    adapter = make_adapter(tiny("llama"), tmp_path / "snapshot")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(adapter))
    first = load("org/Tuned", tmp_path)
    assert first.name == "Tuned"
    assert load("org/Tuned", tmp_path).digest == first.digest
    adapter = Path(shutil.copytree(adapter, tmp_path / "next"))
    change(adapter, lora_alpha=24)
    second = load("org/Tuned", tmp_path)
    other = make_tiny_model("llama", tmp_path / "other", seed=3, tie_word_embeddings=True)
    change(adapter, base_model_name_or_path=str(other))
    third = load("org/Tuned", tmp_path)
    change_tensors(adapter, lambda tensors: tensors.update({name: t + 1 for name, t in tensors.items()}))
    assert len({each.digest for each in (first, second, third, load("org/Tuned", tmp_path))}) == 4
    assert len(list((tmp_path / "cache" / "packed").glob("Tuned*"))) == 1
    assert PackedCache(tmp_path / "cache" / "packed", resolve("org/Tuned", tmp_path / "cache", silent), "fp32").open()


def test_factors_in_bf16(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(tiny("llama"), tmp_path / "tuned")
    change_tensors(adapter, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    exact = Path(shutil.copytree(adapter, tmp_path / "exact"))
    change_tensors(exact, lambda tensors: tensors.update({name: t.float() for name, t in tensors.items()}))
    assert load(adapter, tmp_path).digest == load(exact, tmp_path).digest


def test_the_tokenizer_of_the_adapter(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Trainings rename special tokens and choose another chat template; the model's own ends are never lost."""
    adapter, messages = make_adapter(tiny("llama"), tmp_path / "tuned"), [{"role": "user", "content": "a"}]
    base = load_tokenizer(str(tiny("llama")), tmp_path)
    assert load_tokenizer(str(adapter), tmp_path).render_chat(messages) == base.render_chat(messages)
    renamed = (tiny("llama") / "tokenizer.json").read_text().replace("<|im_start|>", "<|end|>")
    (adapter / "tokenizer.json").write_text(renamed)
    own = load_tokenizer(str(adapter), tmp_path)
    assert own.render_chat(messages) == base.render_chat(messages)  # it has no template
    assert own.eos_ids == base.eos_ids
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    settings = {"chat_template": template, "eos_token": "<|end|>", "bos_token": "<|im_end|>"}
    (adapter / "tokenizer_config.json").write_text(json.dumps(settings))
    (adapter / "modules.json").write_text(
        json.dumps([{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}])
    )
    (adapter / "1_Pooling").mkdir()
    (adapter / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    own = load_tokenizer(str(adapter), tmp_path)
    assert own.render_chat(messages) == "<|im_end|>a<|end|>"
    assert own.eos_ids == (base.token_id("<|im_start|>"), *base.eos_ids)
    assert own.pooling == "last"
    assert load(adapter, tmp_path).tokenizer.eos_ids == own.eos_ids


def test_factors_of_an_image_encoder_are_left_out(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(tiny("llama"), tmp_path / "tuned")
    digest = load(adapter, tmp_path).digest
    tower = "base_model.model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.lora_{}.weight"
    change_tensors(adapter, lambda t: t.update({tower.format(x): torch.ones(4, 4) for x in "AB"}))
    assert load(adapter, tmp_path).digest == digest


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora True is not supported; merge it"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens \[1, 2\] is not supported"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern .* is not supported"),
        ({"revision": "v2"}, "revision 'v2' is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported"),
        ({"lora_alpha": "many"}, "holds a value of the wrong kind"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path must name the adapter's base model, got None"),
        ({"base_model_name_or_path": "./gone"}, "gone: no such file or folder; base_model_name_or_path in .* names it"),
        ({"base_model_name_or_path": "EMPTY"}, "no .safetensors weights; .*; base_model_name_or_path in .* names it"),
        ({"base_model_name_or_path": "SELF"}, "is an adapter too"),
        (
            {"base_model_name_or_path": "BITS"},
            "'bitsandbytes' is not supported; .*; base_model_name_or_path in .* names it",
        ),
        (
            {"base_model_name_or_path": "OTHER"},
            r"layers.0.k .*\[32, 4\], which does not fit other, where it is \[64, 64\]; ",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], words: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(tiny("llama"), tmp_path / "tuned")
    make_tiny_model("qwen3", tmp_path / "other")
    bits = Path(shutil.copytree(tiny("llama"), tmp_path / "bits"))
    shape = json.loads((bits / "config.json").read_text())
    (bits / "config.json").write_text(json.dumps(shape | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    (tmp_path / "empty").mkdir()
    shutil.copy(tiny("llama") / "config.json", tmp_path / "empty")
    places = {
        "EMPTY": str(tmp_path / "empty"),
        "SELF": str(adapter),
        "OTHER": str(tmp_path / "other"),
        "BITS": str(bits),
    }
    change(adapter, **{key: places.get(str(value), value) for key, value in fields.items()})
    with pytest.raises(ModelError, match=words):
        load(adapter, tmp_path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.update({"base_model.model.model.embed_tokens.weight": torch.zeros(1)}), "is no LoRA factor"),
        (lambda t: t.clear(), "its safetensors file holds no tensors; save the adapter again"),
        (lambda t: t.pop(next(n for n in t if "layers.1.mlp.up_proj.lora_B" in n)), "lora_B of layers.1.up is missing"),
        (
            lambda t: t.update({"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64),
                                "base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight": torch.zeros(64, 4)}),
            "layers.9.q .*does not fit",
        ),
        (lambda t: t.update({n: torch.zeros(4, 65) for n in t if "0.mlp.down_proj.lora_A" in n}), "does not fit"),
        (lambda t: t.update({n: torch.zeros((0, 96) if "_A" in n else (64, 0)) for n in t if ".0.mlp.d" in n}), "fit"),
        (lambda t: t.update({n: torch.zeros(64, 3) for n in t if "0.mlp.down_proj.lora_B" in n}), "does not fit"),
        (lambda t: t.update({n: torch.zeros(64) for n in t if "0.mlp.down_proj.lora_B" in n}), "of the wrong kind"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    edit: Callable[[dict[str, torch.Tensor]], object], words: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = make_adapter(tiny("llama"), tmp_path / "tuned")
    change_tensors(adapter, edit)
    with pytest.raises(ModelError, match=words):
        load(adapter, tmp_path)


def test_other_kinds_that_peft_saves_are_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    for name, settings in {"bias": {"bias": "lora_only"}, "saved": {"modules_to_save": ["lm_head"]}}.items():
        base = tiny("qwen2")
        adapter = make_adapter(base, tmp_path / name, **settings)
        with pytest.raises(UnsupportedModelError, match="is no LoRA factor of a linear layer; merge it"):
            load(adapter, tmp_path)


def test_an_incomplete_download(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(tiny("llama"), tmp_path / "tuned")
    data = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="truncated or corrupt"):
        load(adapter, tmp_path)
    (adapter / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=f"an adapter needs {WEIGHTS} and nothing beside it, found no weights"):
        load(adapter, tmp_path)


@pytest.mark.parametrize("name", ["adapters.safetensors", "new_embeddings.safetensors"])  # of MLX, and of vLLM
def test_files_of_other_libraries(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(tiny("llama"), tmp_path / "tuned")
    shutil.copy(adapter / WEIGHTS, adapter / name)
    if name.startswith("adapters"):
        (adapter / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=f"an adapter needs {WEIGHTS} and nothing beside it, found {name}; save it"):
        load(adapter, tmp_path)


def test_a_configuration_spoiled_by_hand(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = change(make_adapter(tiny("llama"), tmp_path / "tuned"), lora_alpha=[])
    config = adapter / "adapter_config.json"
    for text in (config.read_text(), config.read_text().replace('"', "'"), "[]"):
        config.write_text(text)
        with pytest.raises(ModelError, match=r"adapter_config\.json: .*; correct it or fetch it again"):
            load(adapter, tmp_path)


def test_its_base_has_to_be_here(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(tiny("llama"), tmp_path / "tuned")
    assert is_here(str(adapter), tmp_path)
    assert is_here(str(change(adapter, base_model_name_or_path=str(adapter))), tmp_path)
    assert is_here(str(change(adapter, base_model_name_or_path=None)), tmp_path)  # `resolve` says what is wrong
    assert not is_here(str(change(adapter, base_model_name_or_path="org/base")), tmp_path)
    shutil.copy(tiny("llama") / "model.safetensors", adapter)
    shutil.copy(tiny("llama") / "config.json", adapter)
    assert is_here(str(adapter), tmp_path)  # a whole model beside the adapter


def test_a_merged_file_beside_the_adapter(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(tiny("llama"), tmp_path / "tuned")
    write_tiny_gguf(tiny("llama"), adapter / "merged.gguf")
    assert differences(load(adapter, tmp_path).weights, load_oracle(tiny("llama")), tolerance=1e-6) == []


def test_a_base_that_may_not_be_read(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = change(make_adapter(tiny("llama"), tmp_path / "tuned"), base_model_name_or_path="/srv/base")
    status = os.stat

    def denied(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith("/srv/base"):
            raise PermissionError(13, "Permission denied", path)
        return status(path, **options)

    monkeypatch.setattr("os.stat", denied)
    with pytest.raises(ModelError, match="/srv/base: no such file or folder"):
        resolve(str(adapter), tmp_path, silent)


def test_an_adapter_of_a_hub_id_that_names_itself(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = change(make_adapter(tiny("llama"), tmp_path / "tuned"), base_model_name_or_path="org/tuned")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(adapter))
    with pytest.raises(ModelError, match="org/tuned: is an adapter too; merge it"):
        resolve("org/tuned", tmp_path, silent)
