"""A .gguf model in Q8_0, llama.cpp's next of kin to int8: ``python -m bench.peers.requantise FILE FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType, dequantize, quantize

_Q8_0 = GGMLQuantizationType.Q8_0
_AS_IT_IS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, _Q8_0)
_OWN = (Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE)  # written by us


def requantise(source: Path, target: Path) -> None:
    """Write ``target``, all of it or nothing. Norms and biases stay as they are."""
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


if __name__ == "__main__":
    requantise(Path(sys.argv[1]), Path(sys.argv[2]))
