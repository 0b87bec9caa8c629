"""The model to compare on, in the forms that the engines read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from gguf import LlamaFileType

from bench.peers.conversion import converted
from bench.peers.peer_error import PeerError
from specdec.models.gguf_file import GGUFFile
from specdec.models.hf_source import weight_files
from specdec.models.progress import Progress
from specdec.models.resolve import resolve


@dataclass(frozen=True, slots=True)
class PeerModel:
    """``ref``: as `resolve` takes it; ``path``: the .gguf file or the Hugging Face folder. ``weights``: the numeric
    type of the file's numbers. ``n_weights``: how many, roughly. ``exports``: where what is made from it is kept."""

    ref: str
    name: str
    path: Path
    weights: str
    n_weights: int
    exports: Path

    def gguf(self) -> Path:
        """The file; raises PeerError where there is none."""
        if self.path.suffix != ".gguf":
            raise PeerError(f"{self.name} is no .gguf file; take a model that is one")
        return self.path

    async def folder(self) -> Path:
        """The folder, exported on first use; raises PeerError."""
        if self.path.is_dir():
            return self.path
        return await converted("bench.peers.export_model", self.path, self.exports / f"{self.path.stem}-bf16")

    async def q8_0(self) -> Path:
        """The .gguf file in Q8_0, made on first use; raises PeerError."""
        file = self.gguf()
        return await converted("bench.peers.requantise", file, self.exports / f"{file.stem}-Q8_0.gguf")


def find_model(ref: str, cache_dir: Path, exports: Path, progress: Progress) -> PeerModel:
    """What ``ref`` names, fetched where it has to be; raises as `resolve`."""
    checkpoint = resolve(ref, cache_dir, progress)
    path = checkpoint.path
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        count = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
        return PeerModel(ref, checkpoint.name, path, _file_type(file.metadata.get("general.file_type")), count, exports)
    count = sum(weights.stat().st_size for weights in weight_files(path)) // 2
    return PeerModel(ref, checkpoint.name, path, "as in the folder", count, exports)


def _file_type(number: int | None) -> str:
    try:
        return LlamaFileType(number).name.removeprefix("MOSTLY_")
    except ValueError:
        return "as in the file"
