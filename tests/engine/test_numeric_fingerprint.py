"""The numeric fingerprint: exactly what determines the bits changes it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import EngineConfig
from specdec.core.types import Request, Started
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine
from specdec.errors import FingerprintMismatchError
from specdec.models.load import load_model
from tests.engine.tiny_engine import run_all, tiny_parts
from tests.models.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "target")


def _fingerprint(folder: Path, cache: Path, **changes: Any) -> str:
    cache.mkdir(exist_ok=True)
    if not (cache / "kernels").exists():
        kernels = Path("~/.cache/specdec/kernels").expanduser()
        kernels.mkdir(parents=True, exist_ok=True)
        (cache / "kernels").symlink_to(kernels)  # they are built once; the packed weights are each folder's own
    settings = {
        "target": str(folder), "cache_dir": cache, "kv_tokens": 1024, "max_batch": 2, "max_step_rows": 64,
        "prefill_chunk": 32, "threads": 1, "max_context": 256,
    }  # fmt: skip
    settings["speculation"] = {"drafters": ("suffix",), "profile_s": 0}
    config = EngineConfig.model_validate(settings | changes)
    return build_parts(config).info.numeric_fingerprint


def test_the_fingerprint_covers_exactly_what_determines_the_bits(folder: Path, tmp_path: Path) -> None:
    ours = _fingerprint(folder, tmp_path / "a")
    assert len(ours) == 32
    assert int(ours, 16) >= 0
    other_shape = {
        "threads": 2, "max_batch": 4, "max_step_rows": 96, "kv_tokens": 2048, "max_context": 384,
        "draft": str(folder), "speculation": {"drafters": ("suffix", "model"), "profile_s": 0},
    }  # fmt: skip
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved / folder.name)
    for file in (moved / folder.name).iterdir():
        os.utime(file, (1, 1))
    same = [
        _fingerprint(folder, tmp_path / "a"),  # weights packed before
        _fingerprint(folder, tmp_path / "a", **other_shape),
        _fingerprint(moved / folder.name, tmp_path / "b"),  # packed on another machine from a copy
    ]
    assert same == [ours] * 3
    others = [
        _fingerprint(make_tiny_model("llama", tmp_path / "other", seed=3), tmp_path / "a"),
        _fingerprint(folder, tmp_path / "a", dtype="bf16"),
        _fingerprint(folder, tmp_path / "a", kv_dtype="int8"),
        _fingerprint(folder, tmp_path / "a", kernels="reference"),
    ]
    differences = [
        str(FingerprintMismatchError.between(ours, other)).partition("what differs: ")[2] for other in others
    ]
    assert [text.partition(";")[0] for text in differences] == [
        "weights", "weights, numeric types", "numeric types", "kernels or processor",
    ]  # fmt: skip


def test_one_weight_with_one_different_bit_is_another_model(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    (file,) = changed.glob("*.safetensors")
    tensors = load_file(file)
    norm = next(tensor for name, tensor in tensors.items() if name.endswith("norm.weight"))
    norm[3] = torch.nextafter(norm[3].float(), torch.tensor(9.0)).to(norm.dtype) if norm.dtype == torch.float32 else 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    models = [load_model(str(each), dtype="int8", cache_dir=tmp_path / "c") for each in (folder, changed, folder)]
    assert models[0].digest == models[2].digest != models[1].digest


def test_a_stream_reports_the_fingerprint_to_resume_with() -> None:
    parts = tiny_parts()
    parts = dataclasses.replace(parts, info=dataclasses.replace(parts.info, numeric_fingerprint="feed"))
    started = [event for event in run_all(Engine(parts), [Request("r", (1, 2, 3))]) if isinstance(event, Started)]
    assert [event.numeric_fingerprint for event in started] == ["feed"]
