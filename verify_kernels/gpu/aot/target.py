"""The chips that kernels are compiled for, and what blocks of threads may use of them."""

from __future__ import annotations

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

from verify_kernels.gpu.kernel_launch import CompileCase


@dataclass(frozen=True, slots=True)
class Usage:
    """``registers`` per thread; ``spills``: bytes per thread on NVIDIA, registers on AMD; ``shared`` and ``scratch``
    (global) in bytes per block; ``tensor_memory`` in columns (Blackwell only)."""

    threads: int
    registers: int
    spills: int
    shared: int
    scratch: int
    tensor_memory: int


_KIB = 1024
_MAX_THREADS = 1024  # per block, on every chip
_TENSOR_MEMORY = 512  # columns
_FP8 = ("fp8e4nv", "fp8e4b8", "fp8e4b15", "fp8e5", "fp8e5b16")


@dataclass(frozen=True, slots=True)
class Target:
    """A chip.

    ``shared``: bytes of shared memory (LDS) one block may have; ``shared_total``: bytes that all blocks of a
    multiprocessor may have, of which each takes ``shared_own`` more than it asks for. ``registers``: 32-bit registers
    per thread that the register file has for one block, times the block's ``register_lanes`` threads (all threads
    share one file on NVIDIA; on AMD a block's waves spread over four SIMDs of 64 lanes). ``fp8``: float8 formats its
    hardware knows.

    Sources: CUDA C++ Programming Guide, table of compute capabilities; AMD Instinct MI300 ISA (2025), sections 3.6
    and 3.7: 512 VGPRs per lane, ArchVGPRs and AccVGPRs together, given out in eights.
    """

    name: str
    gpu: GPUTarget
    shared: int
    shared_total: int
    shared_own: int
    registers: int
    register_lanes: int
    fp8: tuple[str, ...]

    def runs(self, case: CompileCase) -> bool:
        """Whether ``case`` is meant for this chip, which also has every number format that it uses."""
        meant = not case.targets or any(text in self.name for text in case.targets)
        formats = [*case.signature.values(), *map(str, case.constexprs.values())]
        used = {name for text in formats for name in _FP8 if text.removeprefix("*") == name}
        return meant and used <= set(self.fp8)

    def problems(self, usage: Usage, resident: int = 1) -> list[str]:
        """What ``usage`` asks of the chip that it does not have, or should not be asked for; ``resident``: by so many
        blocks at once on a multiprocessor."""
        per_lane = -(-usage.registers // 8) * 8
        groups = -(-usage.threads // self.register_lanes)
        together = resident * (usage.shared + self.shared_own)
        checks = (
            (usage.spills > 0, f"spills {usage.spills} {'bytes' if self.gpu.backend == 'cuda' else 'registers'}"),
            (usage.shared > self.shared, f"shared memory {usage.shared} bytes, {self.shared} at most"),
            (
                resident > 1 and together > self.shared_total,
                f"shared memory of {resident} blocks is {together} bytes, a multiprocessor has {self.shared_total}",
            ),
            (
                resident > 1 and per_lane * groups * resident > self.registers,
                f"{usage.registers} registers x {usage.threads} threads do not fit {resident} times in the file",
            ),
            (usage.threads > _MAX_THREADS, f"{usage.threads} threads a block, {_MAX_THREADS} at most"),
            (
                per_lane * groups > self.registers,
                f"{usage.registers} registers x {usage.threads} threads do not fit in the register file",
            ),
            (usage.tensor_memory > _TENSOR_MEMORY, f"{usage.tensor_memory} columns of tensor memory"),
            (usage.scratch > 0, f"{usage.scratch} bytes of global scratch per block, which a CUDA graph can not have"),
        )
        return [text for broken, text in checks if broken]


def _nvidia(capability: int, shared_total: int, fp8: tuple[str, ...]) -> Target:
    """CUDA keeps 1 KiB of shared memory per block to itself."""
    gpu = GPUTarget("cuda", capability, 32)
    return Target(f"sm_{capability}", gpu, shared_total - _KIB, shared_total, _KIB, 65536 // 32, 32, fp8)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia(80, 164 * _KIB, ()),
        _nvidia(90, 228 * _KIB, ("fp8e4nv", "fp8e5")),
        _nvidia(100, 228 * _KIB, ("fp8e4nv", "fp8e5")),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * _KIB, 64 * _KIB, 0, 512, 4 * 64, ("fp8e4b8", "fp8e5b16")),
    )
}
