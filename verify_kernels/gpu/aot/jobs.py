"""The chips, the kernels' compile cases, and compiling a case for a chip."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from verify_kernels.gpu.kernel_launch import PDL_CHIPS, SMALL, CompileCase, launch_options


@dataclass(frozen=True, slots=True)
class Usage:
    """What a compiled kernel takes."""

    threads: int  # per block
    registers: int  # per thread
    spills: int  # bytes per thread on NVIDIA, registers on AMD
    shared: int  # bytes per block
    scratch: int  # bytes of global memory per block
    tensor_memory: int  # columns (Blackwell only)


_KIB = 1024
_WAYS = {"sm_90": 3}  # parameters whose values `covering` combines, by target
_OTHER_WAYS = 2  # on targets that `_WAYS` does not name
_ALL_WAYS = 99  # more parameters than a kernel has: every case
_MAX_THREADS = 1024  # per block, on every chip
_TENSOR_MEMORY = 512  # columns


@dataclass(frozen=True, slots=True)
class Target:
    """A chip.

    Sources: CUDA C++ Programming Guide, table of compute capabilities; AMD Instinct MI300 ISA (2025), sections 3.6
    and 3.7: 512 VGPRs per lane, ArchVGPRs and AccVGPRs together, allocated in eights. On NVIDIA all threads share one
    register file; on AMD a block's waves spread over four SIMDs of 64 lanes.
    """

    name: str
    gpu: GPUTarget
    shared: int  # bytes of shared memory (LDS) of a multiprocessor
    shared_own: int  # bytes that each block takes in addition to its request
    registers: int  # 32-bit registers of the register file per lane
    register_lanes: int  # lanes of the register file
    fp8: bool  # whether its hardware has float8 e4m3, the kernels' only one
    named: bool = False  # whether to compile only cases that name it; sm_80 and sm_100 stand for it in all others

    def runs(self, case: CompileCase) -> bool:
        """Whether ``case`` is meant for this chip, and the chip has all its number formats."""
        meant = any(text in self.name for text in case.targets) or not (case.targets or self.named)
        formats = {*case.signature.values(), *map(str, case.constexprs.values())}
        return meant and (self.fp8 or formats.isdisjoint(("*fp8e4nv", "fp8e4nv")))

    def problems(self, usage: Usage, resident: int = 1) -> list[str]:
        """The limits of the chip that ``usage`` breaks, with ``resident`` blocks at once on a multiprocessor."""
        room = self.shared // resident - self.shared_own
        registers = -(-usage.registers // 8) * 8 * -(-usage.threads // self.register_lanes)
        checks = (
            (usage.spills > 0, f"spills {usage.spills} {'bytes' if self.gpu.backend == 'cuda' else 'registers'}"),
            (usage.shared > room, f"shared memory {resident} x {usage.shared} bytes, {room} each at most"),
            (
                registers * resident > self.registers,
                f"{resident} x {usage.registers} registers x {usage.threads} threads do not fit in the register file",
            ),
            (usage.threads > _MAX_THREADS, f"{usage.threads} threads a block, {_MAX_THREADS} at most"),
            (usage.tensor_memory > _TENSOR_MEMORY, f"{usage.tensor_memory} columns of tensor memory"),
            (usage.scratch > 0, f"{usage.scratch} bytes of global scratch per block, which a CUDA graph cannot have"),
        )
        return [text for broken, text in checks if broken]


def _nvidia(capability: int, shared: int) -> Target:
    """CUDA keeps 1 KiB of shared memory per block to itself."""
    gpu, name = GPUTarget("cuda", capability, 32), f"sm_{capability}"
    return Target(name, gpu, shared, _KIB, 65536 // 32, 32, capability >= 89, name in SMALL)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia(80, 164 * _KIB),
        _nvidia(89, 100 * _KIB),
        _nvidia(90, 228 * _KIB),
        _nvidia(100, 228 * _KIB),
        _nvidia(120, 100 * _KIB),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * _KIB, 0, 512, 4 * 64, False),  # float8 of its own
    )
}


@dataclass(frozen=True, slots=True)
class Job:
    """A case to compile for a chip, by names."""

    module: str  # that has the case
    case: str
    kernel: str
    target: str

    @property
    def label(self) -> str:
        """The case's name in reports: the module's last name and the case's."""
        return f"{self.module.rpartition('.')[2]}.{self.case}"


@dataclass(frozen=True, slots=True)
class Row:
    """The report on a job."""

    job: Job
    usage: Usage | None  # None if it did not compile
    problems: tuple[str, ...]  # empty if all is well
    seconds: float  # of the compilation; almost 0 if triton's cache had it

    def as_json(self) -> dict[str, Any]:
        """Flat, for a JSON report."""
        usage = asdict(self.usage) if self.usage else {}
        seconds = round(self.seconds, 3)
        return {**asdict(self.job), "case": self.job.label, **usage, "seconds": seconds, "problems": [*self.problems]}


KERNEL_MODULES: tuple[str, ...] = (
    "verify_kernels.gpu.accept",
    "verify_kernels.gpu.act",
    "verify_kernels.gpu.attention_plan",
    "verify_kernels.gpu.kv_ops",
    "verify_kernels.gpu.linear",
    "verify_kernels.gpu.linear_int4",
    "verify_kernels.gpu.norm",
    "verify_kernels.gpu.quantize",
    "verify_kernels.gpu.sampling",
    "verify_kernels.gpu.tree_attention",
)


def load_cases(module: str) -> list[CompileCase]:
    """The cases of ``module``'s ``compile_cases()``; import errors propagate.

    Raises:
        ValueError: there are none, or two have the same name.
    """
    cases: list[CompileCase] = importlib.import_module(module).compile_cases()
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not cases or twice:
        raise ValueError(f"{module}.compile_cases(): {'names ' + ', '.join(twice) + ' twice' if twice else 'empty'}")
    return cases


def plan_jobs(modules: Sequence[str], targets: Sequence[Target], only: Sequence[str], ways: int | None) -> list[Job]:
    """For each target and each kernel of ``modules`` the cases that cover it.

    only: of the cases whose "module.case" contains one of these texts; empty: of all.
    ways: see `covering`; None: those of the target, or all cases where ``only`` names some.
    """
    jobs: list[Job] = []
    for target in targets:
        kernels: dict[tuple[str, str], dict[Job, CompileCase]] = {}
        for module, case in ((name, case) for name in modules for case in load_cases(name)):
            job = Job(module, case.name, case.kernel.__name__, target.name)
            if target.runs(case) and (not only or any(text in job.label for text in only)):
                kernels.setdefault((module, job.kernel), {})[job] = case
        default = _ALL_WAYS if only else _WAYS.get(target.name, _OTHER_WAYS)
        jobs += [job for cases in kernels.values() for job in covering(cases, default if ways is None else ways)]
    return jobs


def covering(cases: Mapping[Job, CompileCase], ways: int) -> list[Job]:
    """Enough of a kernel's cases to have every combination of values of ``ways`` parameters that any of them has.

    Parameters are types, constants, alignments and launch options; those that change together count as one. Of
    equal choices the last is taken, as tiles rise. 0 ways keep one case; as many as parameters all that differ.
    """
    described = [
        {**case.signature, **case.constexprs, **case.options, **{f"{name} aligned": True for name in case.divisible}}
        for case in cases.values()
    ]
    names = {name for values in described for name in values}
    columns = [[repr(values.get(name, "absent")) for values in described] for name in names]
    rows = zip(*sorted({tuple(map(column.index, column)) for column in columns}), strict=True)
    held = {job: set(combinations(enumerate(row), min(ways, len(row)))) for job, row in zip(cases, rows, strict=True)}
    missing, kept = set[Any]().union(*held.values()), set[Job]()
    while missing:
        best = max(reversed(held), key=lambda job: len(held[job] & missing))
        kept.add(best)
        missing -= held[best]
    return [job for job in cases if job in kept]


def kernel_source(case: CompileCase) -> ASTSource:
    """``case``'s kernel with its types, constants and alignments.

    Raises:
        ValueError: the case does not fit its kernel; the message names the arguments or options.
    """
    kernel = case.kernel
    if not isinstance(kernel, JITFunction):
        raise ValueError(f"kernel is a {type(kernel).__name__}; compile with TRITON_INTERPRET unset")
    constexprs = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default} | dict(case.constexprs)
    _refuse("signature or constexprs name no argument", (*case.signature, *constexprs), kernel.arg_names)
    _refuse("arguments lack a type", kernel.arg_names, (*case.signature, *constexprs))
    declared = {p.name for p in kernel.params if p.is_constexpr}
    _refuse("constexpr arguments stand in the signature", declared & set(case.signature), ())
    _refuse("arguments stand in the signature and in constexprs", set(case.signature) & set(constexprs), ())
    _refuse("divisible names no integer", case.divisible, [n for n, kind in case.signature.items() if kind[0] in "iu"])
    types = {name: case.signature.get(name, "constexpr") for name in kernel.arg_names}
    # Tensors lie at multiples of 16 bytes, see `verify_kernels.gpu.kernel_launch`, or the kernel does not look.
    looked_at = [p.name for p in kernel.params if types[p.name][0] == "*" and not p.do_not_specialize]
    aligned = sorted(kernel.arg_names.index(name) for name in (*looked_at, *case.divisible))
    attrs = {(index,): [["tt.divisibility", 16]] for index in aligned}
    return ASTSource(kernel, types, constexprs, attrs)


def _refuse(what: str, names: Any, known: Any) -> None:
    wrong = sorted(set(names) - set(known))
    if wrong:
        raise ValueError(f"{what}: {', '.join(wrong)}")


def _launch_options(case: CompileCase, target: Target) -> dict[str, Any]:
    """The options with which ``case`` is launched on ``target``.

    Raises:
        ValueError: a launch would refuse one; compilation alone ignores it.
    """
    options, gpu = launch_options(case.options, target.name), target.gpu
    _refuse(f"launch options are refused by {gpu.backend}", options, vars(make_backend(gpu).parse_options({})))
    return options


def read_usage(compiled: Any) -> Usage:
    """The usage of ``compiled`` (triton's CompiledKernel).

    Raises:
        ValueError: the binary does not state it in a known way.
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
        raise ValueError("cuobjdump reports no registers for this kernel")
    return max(int(reg) for reg, _, _ in found), sum(int(stack) + int(local) for _, stack, local in found)


def _amdgcn(text: str) -> tuple[int, int]:
    """Vector registers (both kinds) per lane, and spilled registers, scalar ones too."""
    found = dict(re.findall(r"^\s*\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", text, re.MULTILINE))
    if len(found) != 3:
        raise ValueError("the assembly's metadata reports no registers for this kernel")
    return int(found["vgpr_count"]), int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"])


def compile_job(job: Job) -> Row:
    """Compile ``job``; every error becomes a problem of the report."""
    target = TARGETS[job.target]
    start = time.monotonic()
    try:
        case = next(case for case in load_cases(job.module) if case.name == job.case)
        compiled = triton.compile(kernel_source(case), target=target.gpu, options=_launch_options(case, target))
        usage = read_usage(compiled)
    except Exception as error:  # triton's compiler raises many types
        return Row(job, None, (f"does not compile: {type(error).__name__}: {error}",), time.monotonic() - start)
    problems = target.problems(usage, case.resident)
    if target.name in PDL_CHIPS and not _waits(compiled.asm["ptx"]):
        problems.append("stores, or releases the next launch, before await_only()")
    return Row(job, usage, tuple(problems), time.monotonic() - start)


def _waits(ptx: str) -> bool:
    """Whether a kernel waits for earlier launches before it stores anything or releases the next one."""
    later = re.search(r"\b(?:st\.global|st\.async|atom\.|red\.|griddepcontrol\.launch_dependents)", ptx)
    return 0 <= ptx.find("griddepcontrol.wait") < (later.start() if later else len(ptx))
