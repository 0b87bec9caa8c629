"""Reads what a compiled kernel takes from its binary, as the assembler of the chip noted it there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

from triton import knobs

from verify_kernels.gpu.aot.usage import Usage


def read_usage(compiled: Any) -> Usage:
    """The usage of ``compiled`` (triton's CompiledKernel).

    Raises:
        ValueError: its binary does not tell; this triton writes it in a way not known here.
    """
    metadata = compiled.metadata
    binary = _cubin(compiled.asm["cubin"]) if "cubin" in compiled.asm else _amdgcn(compiled.asm["amdgcn"])
    registers, spills = binary
    return Usage(
        threads=metadata.num_warps * metadata.target.warp_size,
        registers=registers,
        spills=spills,
        shared=metadata.shared,
        scratch=getattr(metadata, "global_scratch_size", 0) or 0,
        tensor_memory=getattr(metadata, "tmem_size", 0) or 0,
    )


def _cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread. Triton's kernels have no local arrays: a stack holds spills alone."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"\bREG:(\d+) STACK:(\d+) .*?\bLOCAL:(\d+)", text)
    if not found:
        raise ValueError("cuobjdump tells no registers of this kernel")
    return max(int(reg) for reg, _, _ in found), sum(int(stack) + int(local) for _, stack, local in found)


def _amdgcn(text: str) -> tuple[int, int]:
    """Vector registers (both kinds) per lane, and spilled registers, scalar ones too."""
    found = dict(re.findall(r"^\s*\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", text, re.MULTILINE))
    if len(found) != 3:
        raise ValueError("the assembly's metadata tells no registers of this kernel")
    return int(found["vgpr_count"]), int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"])
