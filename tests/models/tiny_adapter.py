"""Makes LoRA adapters with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from tests.models.tiny import load_oracle

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """Saves a random adapter for the model in ``base`` as PEFT does."""
    torch.manual_seed(1)
    config = LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": ALL, "task_type": "CAUSAL_LM"} | settings)
    model = get_peft_model(load_oracle(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder
