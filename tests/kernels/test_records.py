"""The records that Python fills are the structs that the C++ kernels read, field by field: a field that only one of the
two has would shift all others."""

from __future__ import annotations

import ctypes
import re

import pytest

from verify_kernels.cpu import native_backend as native
from verify_kernels.cpu.library import SOURCES

CODE = re.sub(r"//.*", "", "\n".join(path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.*"))))
KINDS = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
STRUCTS = {
    "sd_linear_args": native.LinearArgs, "sd_experts_args": native.ExpertsArgs, "sd_batch": native.BatchArgs,
    "sd_attention_args": native.AttentionArgs, "sd_layer": native.LayerRecord,
}  # fmt: skip


def declared(struct: str) -> list[tuple[str, bool, int]]:
    """Name, whether it is a pointer, and bytes of each field in C++."""
    (body,) = re.findall(rf"struct {struct} \{{(.*?)\n\}};", CODE, re.DOTALL)
    found = []
    for text in filter(None, (" ".join(line.split()) for line in body.split(";"))):
        kind, star, names = re.fullmatch(r"(?:const )?(\w+)(\*?) (.+)", text).groups()  # type: ignore[union-attr]
        size = ctypes.sizeof(ctypes.c_void_p if star else KINDS[kind])
        found += [(name, bool(star), size) for name in names.split(", ")]
    return found


@pytest.mark.parametrize("struct", STRUCTS)
def test_a_record_has_the_fields_of_its_struct(struct: str) -> None:
    fields = [(name, kind) for name, kind, *_ in STRUCTS[struct]._fields_]
    ours = [(name, kind not in KINDS.values(), ctypes.sizeof(kind)) for name, kind in fields]
    assert ours == declared(struct)


@pytest.mark.parametrize(
    ("prefix", "numbers"),
    [
        ("SD_", native._KINDS), ("SD_PRE_", native._PROLOGUES), ("SD_POST_", native._EPILOGUES),
        ("SD_", {kind.__name__.removesuffix("Args"): number for kind, number in native._LAYERS.items()}),
    ],
    ids=["weights", "prologues", "epilogues", "layers"],
)  # fmt: skip
def test_numbers_in_records_are_those_of_the_enums(prefix: str, numbers: dict[str, int]) -> None:
    theirs = {name: int(number) for name, number in re.findall(r"\b(SD_\w+) = (\d+)", CODE)}
    assert {name: theirs[prefix + name.upper()] for name in numbers} == numbers
