"""Converts a .gguf model for engines that read only folders: ``python -m bench.peers.conversion FILE FOLDER``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bench.peers.peer import PeerError
from specdec.child_python import module_command, module_environment

_SHOWN = 300  # characters of the converter's output in an error


def exported(source: Path, target: Path) -> Path:
    """The folder ``target``, written by `export` in a process of its own unless it exists.

    Raises:
        PeerError: the conversion failed; includes the end of its output.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    words = [*module_command("bench.peers.conversion"), str(source), str(target)]
    done = subprocess.run(
        words, env=module_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise PeerError(f"{source.name} could not be converted: {done.stdout.strip()[-_SHOWN:]}")
    return target


def export(source: Path, folder: Path) -> None:
    """Write a complete Hugging Face checkpoint in bf16 to ``folder``, or nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The dequantised model still refers to its quantiser, which refuses to save it.
    model.hf_quantizer, model.is_quantized = None, False
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
