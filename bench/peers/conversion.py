"""Other forms of a .gguf model for the other engines: ``python -m bench.peers.conversion FORM FILE TARGET``."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType, dequantize, quantize

from bench.peers.peer import PeerError

_SHOWN = 300


async def converted(form: str, source: Path, target: Path) -> Path:
    """``target``, ``source`` in ``form`` (one of `FORMS`), made in a process of its own unless it is there already.

    Raises:
        PeerError: it could not be made; holds the last words.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "bench.peers.conversion", form, str(source), str(target)]
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
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


_Q8_0 = GGMLQuantizationType.Q8_0
_AS_IT_IS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, _Q8_0)
_OWN = (Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE)  # written by us


def requantise(source: Path, target: Path) -> None:
    """Write ``target`` in Q8_0, nearest to int8, all of it or nothing. Norms and biases stay as they are."""
    reader = GGUFReader(source)
    unfinished = target.with_name(target.name + ".unfinished")
    writer = GGUFWriter(unfinished, reader.fields[Keys.General.ARCHITECTURE].contents())
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _OWN:
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        if tensor.tensor_type in _AS_IT_IS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = quantize(dequantize(tensor.data, tensor.tensor_type), _Q8_0)
            writer.add_tensor(tensor.name, values, raw_dtype=_Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)


FORMS = {"bf16": export, "q8_0": requantise}


if __name__ == "__main__":
    FORMS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
