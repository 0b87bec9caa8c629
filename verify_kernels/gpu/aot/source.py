"""A compile case as triton's compiler takes it."""

from __future__ import annotations

from typing import Any

from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from verify_kernels.gpu.aot.target import TARGETS
from verify_kernels.gpu.compile_case import CompileCase


def kernel_source(case: CompileCase) -> ASTSource:
    """``case``'s kernel with its types, constants and divisibilities.

    Raises:
        ValueError: the case does not fit its kernel; the message names the arguments or options.
    """
    kernel = case.kernel
    if not isinstance(kernel, JITFunction):
        raise ValueError(f"kernel is a {type(kernel).__name__}; compile with TRITON_INTERPRET unset")
    constexprs = _defaults(case) | dict(case.constexprs)
    _refuse("signature or constexprs name no argument", (*case.signature, *constexprs), kernel.arg_names)
    _refuse("arguments lack a type", kernel.arg_names, (*case.signature, *constexprs))
    declared = {p.name for p in kernel.params if p.is_constexpr}
    _refuse("constexpr arguments stand in the signature", declared & set(case.signature), ())
    _refuse("arguments stand in the signature and in constexprs", set(case.signature) & set(constexprs), ())
    numbers = [name for name, kind in case.signature.items() if kind[0] in "*iu"]
    _refuse("divisible names no pointer or integer", case.divisible, numbers)
    _refuse("options are none of triton's", case.options, _known_options())
    types = {name: case.signature.get(name, "constexpr") for name in kernel.arg_names}
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in case.divisible}
    return ASTSource(kernel, types, constexprs, attrs)


def _defaults(case: CompileCase) -> dict[str, Any]:
    """Constants that the case leaves to the kernel's own defaults."""
    params = case.kernel.params
    return {p.name: p.default for p in params if p.is_constexpr and p.has_default}


def _refuse(what: str, names: Any, known: Any) -> None:
    wrong = sorted(set(names) - set(known))
    if wrong:
        raise ValueError(f"{what}: {', '.join(wrong)}")


def _known_options() -> set[str]:
    """Of any chip: a case for all of them may carry what only some take."""
    return {name for target in TARGETS.values() for name in vars(make_backend(target.gpu).parse_options({}))}
