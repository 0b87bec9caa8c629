"""A .gguf model for engines that read folders only: ``python -m bench.peers.conversion FILE FOLDER``."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from bench.peers.peer import PeerError
from specdec.child_python import module_command, module_environment

_SHOWN = 300


async def exported(source: Path, target: Path) -> Path:
    """``target``, the folder of `export`, made in a process of its own unless it is there already.

    Raises:
        PeerError: it could not be made; holds the last words.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    words = [*module_command("bench.peers.conversion"), str(source), str(target)]
    process = await asyncio.create_subprocess_exec(
        *words,
        env=module_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise PeerError(f"{source.name} could not be converted: {said.decode('utf-8', 'replace').strip()[-_SHOWN:]}")
    return target


def export(source: Path, folder: Path) -> None:
    """Write ``folder``, a Hugging Face checkpoint in bf16, all of it or nothing."""
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
