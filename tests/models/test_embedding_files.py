"""How a model's files say that it makes embeddings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import pytest

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.load import load_model
from specdec.models.resolve import load_tokenizer
from tests.models.embedders import END, make_embedder, write_modules
from tests.models.tiny import make_tiny_model
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize(
    ("flag", "pooling"), [("pooling_mode_lasttoken", "last"), ("pooling_mode_mean_tokens", "mean")]
)
def test_a_folder_of_sentence_transformers(flag: str, pooling: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_embedder(tmp_path / "m", flag)), tmp_path)
    assert (tokenizer.pooling, tokenizer.end_id) == (pooling, END)
    assert load_model(str(tmp_path / "m"), dtype="fp32", cache_dir=tmp_path).config.tie_embeddings


@pytest.mark.parametrize(("named", "pooling"), [("lasttoken", "last"), ("mean", "mean"), (["lasttoken"], "last")])
def test_a_folder_of_newer_sentence_transformers(named: object, pooling: str, tmp_path: Path) -> None:
    configuration = {"embedding_dimension": 8, "pooling_mode": named, "include_prompt": True}
    write_modules(make_tiny_model("qwen3", tmp_path / "m"), ["Transformer", "Pooling"], configuration)
    assert load_tokenizer(str(tmp_path / "m"), tmp_path).pooling == pooling


@pytest.mark.parametrize(("adds", "end"), [(True, 2), (False, None)])
def test_a_plain_folder(adds: bool, end: int | None, tmp_path: Path) -> None:
    folder = make_tiny_model("qwen3", tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_eos_token": adds}))
    tokenizer = load_tokenizer(str(folder), tmp_path)
    assert (tokenizer.pooling, tokenizer.end_id) == ("", end)


@pytest.mark.parametrize(
    ("kinds", "pooling", "problem"),
    [
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "pooling by pooling_mode_cls_token"),
        (["Transformer", "Pooling"], {"pooling_mode": ["mean", "lasttoken"]}, "pooling by mean, lasttoken"),
        (["Transformer", "Pooling"], {"pooling_mode": "cls"}, "pooling by cls"),
        (["Transformer", "Pooling"], {}, "pooling by nothing"),
        (["Transformer", "Pooling"], {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, "pooling by"),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_lasttoken": True}, "module 'Dense'"),
        (["Transformer"], {}, "pooling by nothing"),
    ],
)
def test_what_would_change_the_vector_is_refused(
    kinds: list[str], pooling: dict[str, object], problem: str, tmp_path: Path
) -> None:
    write_modules(make_tiny_model("qwen3", tmp_path / "m"), kinds, pooling)
    with pytest.raises(UnsupportedModelError, match=re.escape(problem)):
        load_tokenizer(str(tmp_path / "m"), tmp_path)


@pytest.mark.parametrize(
    "text", ["5", "{", "[5]", "[{}]", '[{"type": "Pooling", "path": "../m"}]', '[{"type": "Pooling", "path": "none"}]']
)
def test_damaged_modules_are_refused(text: str, tmp_path: Path) -> None:
    (make_tiny_model("qwen3", tmp_path / "m") / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json|config\.json"):
        load_tokenizer(str(tmp_path / "m"), tmp_path)


@pytest.mark.parametrize("field", [{"use_bidirectional_attention": True}, {"is_causal": False}])
def test_attention_in_both_directions_is_refused(field: dict[str, bool], tmp_path: Path) -> None:
    folder = make_tiny_model("gemma3", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | field))
    with pytest.raises(UnsupportedModelError, match=next(iter(field))):
        load_tokenizer(str(folder), tmp_path)


@pytest.mark.parametrize(("kind", "pooling"), [(0, ""), (1, "mean"), (3, "last"), (4, "rank"), (2, None)])
def test_a_gguf_file(kind: int, pooling: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(writer: gguf.GGUFWriter, adds: bool) -> None:
        writer.add_bool("tokenizer.ggml.add_bos_token", adds)
        writer.add_bool("tokenizer.ggml.add_eos_token", True)
        writer.add_uint32("qwen3.pooling_type", kind)

    monkeypatch.setattr(gguf.GGUFWriter, "add_add_bos_token", add)
    write_tiny_gguf(make_tiny_model("qwen3", tmp_path / "m"), tmp_path / "m.gguf")
    if pooling is None:
        with pytest.raises(UnsupportedModelError, match="pooling type 2"):
            load_tokenizer(str(tmp_path / "m.gguf"), tmp_path)
    else:
        for _ in range(2):  # the second time from the cache
            tokenizer = load_tokenizer(str(tmp_path / "m.gguf"), tmp_path)
            assert (tokenizer.pooling, tokenizer.end_id) == (pooling, 2)
