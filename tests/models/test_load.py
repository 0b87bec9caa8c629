"""Valid model references, and the errors for invalid ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from specdec.control_groups import available_bytes
from specdec.errors import ModelError
from specdec.models.checkpoint import TensorSource
from specdec.models.fetch import fetch_from_hub
from specdec.models.load import load_model
from specdec.models.memory import check_memory
from specdec.models.pack import pack_model
from specdec.models.progress import silent
from specdec.models.resolve import HFCheckpoint
from tests.models.tiny import make_tiny_model
from tests.models.tiny_gguf import write_tiny_gguf

Tiny = Callable[[str], Path]


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("smollm2-135", r"smollm2-135: no such file, folder or catalogue model; did you mean smollm2-135m\?"),
        ("SmolLM2", r"did you mean smollm2-135m\?"),
        ("nothing like it", "the catalogue has smollm2-135m, qwen2.5-coder-1.5b, qwen2.5-coder-0.5b, gemma3-270m"),
        ("./absent", r"\./absent: no such file or folder"),
        ("~nobody-here/model", "~nobody-here/model: no such file or folder"),
        ("absent.gguf", r"absent\.gguf: no such file or folder"),
    ],
)
def test_unknown_references(ref: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load_model(ref, dtype="int8", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model\.bin: not a GGUF file; give one, or a Hugging Face model folder"):
        load_model(str(tmp_path / "model.bin"), dtype="int8", cache_dir=tmp_path)


def test_a_gguf_file_of_any_name(tiny: Tiny, tmp_path: Path) -> None:
    """Caches of downloads name files by their digests."""
    write_tiny_gguf(tiny("llama"), tmp_path / "sha256-4d7a21")
    assert load_model(str(tmp_path / "sha256-4d7a21"), dtype="int8", cache_dir=tmp_path).config.n_layers == 2


def test_a_folder_of_a_gguf_file_and_its_image_encoder(tiny: Tiny, tmp_path: Path) -> None:
    """As LM Studio lays them out."""
    for name in ("mmproj-model-f16.gguf", "vision-q8_0.gguf"):
        write_tiny_gguf(tiny("qwen3"), tmp_path / name)
    assert load_model(str(tmp_path), dtype="int8", cache_dir=tmp_path).name == "vision-q8_0"


def test_a_model_beside_an_adapter_loads(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("qwen3"), tmp_path / "m")
    (tmp_path / "m" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert load_model(str(tmp_path / "m"), dtype="int8", cache_dir=tmp_path).config.family == "qwen3"


def test_hub_ids(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def snapshot(repository: str, **options: Any) -> str:
        requested.append((repository, options))
        return str(tiny("llama"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    loaded = load_model("some-org/Some-Model", dtype="int8", cache_dir=tmp_path)
    assert loaded.name == "Some-Model"
    assert [repository for repository, _ in requested] == ["some-org/Some-Model"]
    wanted = [
        "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja",
        "modules.json", "1_Pooling/config.json",
    ]  # fmt: skip
    others = ["consolidated.safetensors", "onnx/model.onnx", "adapter/adapter_model.safetensors", "README.md"]
    patterns = {name: requested[0][1][name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + others, **patterns)) == wanted

    def offline(repository: str, **options: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match=r"some-org/Some-Model: cannot be had from the hub \(no route\)") as caught:
        load_model("some-org/Some-Model", dtype="int8", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_hub_model_is_pinned_to_the_first_fetched_commit(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, requested = "0123456789abcdef" * 2 + "01234567", []
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "snapshots" / commit))

    def snapshot(repository: str, **options: Any) -> str:
        requested.append(options["revision"])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for name in ("some-org/Some-Model", "some-org/Some-Model", "some-org/Other"):
        assert fetch_from_hub(name, tmp_path / "hub") == folder
    assert requested == [None, commit, None]
    (tmp_path / "hub" / "some-org--Some-Model").unlink()
    fetch_from_hub("some-org/Some-Model", tmp_path / "hub")
    assert requested[3:] == [None]


def test_packed_weights_of_a_former_commit_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (1, 2, 3):
        folder = make_tiny_model("llama", tmp_path / "snapshots" / f"{seed:040x}", seed=seed)
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, folder=folder, **options: str(folder))
        load_model("some-org/Some-Model", dtype="int8", cache_dir=tmp_path / "c")
        load_model("other-org/Some-Model", dtype="int8", cache_dir=tmp_path / "c")
    assert len(list((tmp_path / "c" / "packed").iterdir())) == 2  # one per repository


def test_a_repository_without_safetensors_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of GGUF files, none of which is downloaded."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **options: str(tmp_path))
    with pytest.raises(ModelError, match=r"^some-org/Some-GGUF: holds no safetensors; .* give the path of that file$"):
        load_model("some-org/Some-GGUF", dtype="int8", cache_dir=tmp_path / "c")


def test_an_invalid_pin_is_replaced_and_a_failed_write_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit, requested, pins = "0123456789" * 4, [], tmp_path / "hub"

    def snapshot(repository: str, **options: Any) -> str:
        requested.append(options["revision"])
        return str(tmp_path / "snapshots" / commit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    pins.mkdir()
    for damaged in (b"", b"main\n", commit[:39].encode(), b"\xff\xfe"):
        (pins / "some-org--Some-Model").write_bytes(damaged)
        fetch_from_hub("some-org/Some-Model", pins)
        assert [path.name for path in pins.iterdir()] == ["some-org--Some-Model"]  # and nothing half written
        assert (pins / "some-org--Some-Model").read_text() == commit + "\n"
    (pins / "some-org--Other").mkdir()  # neither readable nor replaceable
    assert fetch_from_hub("some-org/Other", pins).name == commit
    assert requested == [None] * 5
    assert "some-org/Other: commit 0123456789" in caplog.text
    assert sorted(path.name for path in pins.iterdir()) == ["some-org--Other", "some-org--Some-Model"]


def test_tokenizer_larger_than_the_model(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "m"))
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"] |= {f"extra {i}": 1000 + i for i in range(400)}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match=r"m: the tokenizer's ids go up to \d+, the model has 384 rows; they do not"):
        load_model(str(folder), dtype="int8", cache_dir=tmp_path)


def test_end_tokens_are_collected_from_every_file(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "m"))
    data = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(data | {"eos_token_id": [2, 5]}))
    loaded = load_model(str(folder), dtype="int8", cache_dir=tmp_path)
    assert loaded.tokenizer.eos_ids == (2, 5)
    assert loaded.tokenizer.bos_id == 0


def test_end_tokens_are_those_that_the_embedding_has(tiny: Tiny, tmp_path: Path) -> None:
    """The embedding's rows count, whatever `vocab_size` says."""
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 376}
    (folder / "config.json").write_text(json.dumps(config))
    data = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(data | {"eos_token_id": [2, 380, 384]}))
    assert HFCheckpoint(folder).tokenizer(tmp_path).eos_ids == (2, 380)
    assert load_model(str(folder), dtype="int8", cache_dir=tmp_path).tokenizer.eos_ids == (2, 380)


def test_a_refused_hub_model_is_named_by_its_repository(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "0123abc"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"^mine: "):
        pack_model(HFCheckpoint(folder, "mine").open(), "int8", silent)


def test_a_failing_source_stops_packing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: TensorSource, role: str, low: int, high: int) -> torch.Tensor:
        raise ModelError(f"{role} is unreadable")

    threads = torch.get_num_threads()
    monkeypatch.setattr("specdec.models.hf.HFSource.rows", failing)
    with pytest.raises(ModelError, match="is unreadable"):
        load_model(str(tiny("llama")), dtype="int8", cache_dir=tmp_path)
    assert torch.get_num_threads() == threads
    assert not list(tmp_path.glob("packed/*"))


def test_available_memory_respects_the_containers_limit(tmp_path: Path) -> None:
    machine = available_bytes(tmp_path)
    assert machine > 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == pytest.approx(machine, rel=0.2)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\nactive_file 1000\n")
    assert available_bytes(tmp_path) == 401000


def test_the_memory_error_names_sizes_and_alternatives() -> None:
    check_memory("m", 1 << 30, "int8", available=2 << 30)
    with pytest.raises(ModelError, match=r"m: too little memory: fp32 weights need 2\.2 GiB, 2\.0 GiB.*dtype int8"):
        check_memory("m", 2 << 30, "fp32", available=2 << 30)


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4", "int3"])
def test_int8_is_no_way_out_for_weights_as_small(dtype: Any) -> None:
    with pytest.raises(ModelError, match=rf"m: too little memory: {dtype} weights.*; use a smaller model, or free"):
        check_memory("m", 2 << 30, dtype, available=2 << 30)


def test_a_kv_cache_is_no_weights() -> None:
    with pytest.raises(
        ModelError, match=r"cache of m: too little memory: it needs 2\.2 .*; lower engine\.kv_tokens, or"
    ):
        check_memory("cache of m", 2 << 30, None, available=2 << 30)


def test_a_folder_of_the_hub_cache_names_its_snapshot(tiny: Tiny, tmp_path: Path) -> None:
    snapshot = Path(shutil.copytree(tiny("llama"), tmp_path / "models--x--y" / "snapshots" / "0123"))
    with pytest.raises(ModelError, match=f"name a snapshot of it, such as {snapshot}"):
        load_model(str(tmp_path / "models--x--y"), dtype="int8", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("template", ["{{ messages[0].content }}<|new8|>", "{{ messages[0].content }}<|new7|>"])
def test_a_chat_template_with_a_token_that_has_no_row(
    template: str, tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tiny model has eight rows more than its tokenizer has entries."""
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "copy"))
    data = json.loads((folder / "tokenizer.json").read_text())
    size = len(data["model"]["vocab"])
    data["added_tokens"] += [
        data["added_tokens"][0] | {"id": size + i, "content": f"<|new{i}|>"} for i in range(384 - size + 1)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "chat_template.jinja").write_text(template)
    load_model(str(folder), dtype="int8", cache_dir=tmp_path / "cache")
    assert ("writes <|new8|>, for which the model has no row" in caplog.text) == ("new8" in template)
