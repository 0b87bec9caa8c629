"""A .gguf model as a Hugging Face folder in bf16: ``python -m bench.peers.export_model FILE FOLDER``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def export(source: Path, folder: Path) -> None:
    """Write ``folder``, all of it or nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # What is in memory now is a plain model, but it remembers where it came from and would not be saved.
    model.hf_quantizer, model.is_quantized = None, False
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
