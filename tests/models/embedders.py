"""Tiny random models made for embeddings or reranking, in the files that such models come with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModel

from tests.models.tiny import SPECIALS, make_tiny_model, make_tiny_tokenizer

END = 0  # id of SPECIALS[0], which ends embedded texts


def make_embedder(folder: Path, flag: str = "pooling_mode_lasttoken") -> Path:
    """A Qwen3 model without a head, with the files of sentence-transformers. flag: its pooling."""
    make_tiny_model("qwen3", folder)
    bare = AutoModel.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    bare.save_pretrained(folder)  # its tensors have no "model." in front of their names
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {SPECIALS[0]}", special_tokens=[(SPECIALS[0], END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_modules(folder, ["Transformer", "Pooling", "Normalize"], {flag: True, "include_prompt": True})
    return folder


def write_modules(folder: Path, kinds: list[str], pooling: dict[str, object]) -> None:
    """Write modules.json, and the configuration of its pooling module."""
    paths = ["" if kind == "Transformer" else f"{i}_{kind}" for i, kind in enumerate(kinds)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    flags = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"), False)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags | pooling))


def make_reranker(folder: Path) -> Path:
    """A Qwen3 model whose vocabulary has "yes" and "no". The folder's name should contain "reranker"."""
    make_tiny_model("qwen3", folder, vocab_size=400, max_position_embeddings=1024)
    tokenizer = make_tiny_tokenizer(folder, 380)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
