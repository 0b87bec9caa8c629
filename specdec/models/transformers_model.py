"""Reads a model file or folder with transformers, for training and for engines that read its checkpoints only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec.errors import ModelError


def read_with_transformers(path: Path, dtype: torch.dtype) -> Any:
    """The causal model in the Hugging Face folder or GGUF file ``path``, in CPU memory, with weights of ``dtype``.

    Raises:
        ModelError: transformers cannot read it.
    """
    from transformers import AutoModelForCausalLM, GgufConfig  # not at the top: takes seconds
    from transformers.utils import logging

    logging.disable_progress_bar()
    options: dict[str, Any] = {}
    if path.suffix == ".gguf":
        options = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent if options else path, dtype=dtype, local_files_only=True, **options
        )
    except Exception as error:  # the library has no base class of its own
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{path}: transformers cannot read it ({reason})") from None
    if options:
        # The model still refers to its quantiser, which refuses to save it.
        model.hf_quantizer, model.is_quantized = None, False
        model.config.__dict__.pop("quantization_config", None)
    return model
