"""What a checkpoint format offers: a config, a tokenizer, tensors read slice by slice, and a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.config import ModelConfig
from specdec.models.tokenizer import Tokenizer

if TYPE_CHECKING:  # importing torch takes seconds, which reading a tokenizer need not wait for
    from torch import Tensor

    from verify_kernels.packed_weights import BlockKind


class TensorSource(Protocol):
    """Named tensors of one checkpoint, by their role in the decoder.

    Roles: ``embed``, ``lm_head``, ``final_norm`` and ``layers.{i}.`` followed by attn_norm, q, k, v, o, q_norm,
    k_norm, attn_post_norm, mlp_norm, gate, up, down or mlp_post_norm; a bias is the role followed by ``.bias``. A layer
    of experts has router, whose rows are the experts, and ``experts.{e}.`` followed by gate, up or down.
    Values follow one convention whatever the file holds: matrices [out, in], rotary rows half-split, norms that
    multiply as they are. Reading is safe from several threads.
    """

    name: str
    """The model's name in messages."""
    config: ModelConfig
    """The model's shape."""

    def has(self, role: str) -> bool:
        """Whether the checkpoint holds ``role``."""

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of ``role`` as ``rows`` or ``vector`` gives it; ModelError when it is missing."""

    def rows(self, role: str, low: int, high: int) -> Tensor:
        """Rows [low, high) of matrix ``role``, float32 [high - low, in]."""

    def vector(self, role: str) -> Tensor:
        """Vector ``role``, float32."""

    def stored_blocks(self, role: str) -> StoredBlocks | None:
        """The block format of matrix ``role``: the stored one, or one that loses nothing; None where it has none."""
        return None

    def blocks(self, role: str, low: int, high: int) -> Tensor:
        """Rows [low, high) of a matrix with `stored_blocks`, in whole blocks: uint8 [high - low, bytes of a row]."""
        raise LookupError(role)


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """The block format that holds a matrix without loss."""

    kind: BlockKind
    order: Tensor | None = None  # int64 [in], the input at each place of the blocks; None: in order


def expert_of(role: str) -> int | None:
    """The expert that ``role`` belongs to."""
    expert = role.partition(".experts.")[2]
    return int(expert.partition(".")[0]) if expert else None


class FusedSource(TensorSource):
    """A source over ``inner``, which holds gate and up as rows of one matrix, ``gate_up``. q, k and v are rows of
    ``qkv``, or matrices of their own. In each head of q and k of a ``qkv``, ``inner`` has the rotated rows before the
    others; here each half of a head begins with half of the rotated ones (`RopeConfig.rotated`).

    Raises:
        UnsupportedModelError: such a matrix has a bias.
    """

    def __init__(self, inner: TensorSource) -> None:
        self.inner, self.name, self.config = inner, inner.name, inner.config
        if any(inner.has(f"layers.0.{whole}.bias") for whole in ("qkv", "gate_up")):
            raise UnsupportedModelError(f"{inner.name}: biases of fused matrices are not supported; use another model")
        c = inner.config
        q, k, v, gate, up = c.q_size, c.kv_size, c.kv_size, c.intermediate_size, c.intermediate_size
        self._rows = {"gate": ("gate_up", np.arange(gate)), "up": ("gate_up", np.arange(gate, gate + up))}
        if not inner.has("layers.0.q"):
            self._rows |= {
                "q": ("qkv", self._heads(0, q)),
                "k": ("qkv", self._heads(q, k)),
                "v": ("qkv", np.arange(q + k, q + k + v)),
            }

    def _heads(self, start: int, size: int) -> np.ndarray:
        """The rows [start, start + size) of the fused matrix, which are whole heads, in our order."""
        rotated, rest = np.split(np.arange(self.config.head_dim), [self.config.rope.rotated or self.config.head_dim])
        halves = zip(np.split(rotated, 2), np.split(rest, 2), strict=True)
        order = np.concatenate([part for half in halves for part in half])
        return (np.arange(start, start + size, len(order))[:, None] + order).reshape(-1)

    def has(self, role: str) -> bool:
        return self.inner.has(self._whole(role)[0])

    def shape(self, role: str) -> tuple[int, ...]:
        whole, rows = self._whole(role)
        shape = self.inner.shape(whole)
        if rows is None:
            return shape
        if shape[0] != (size := sum(len(own) for name, own in self._rows.values() if whole.endswith(name))):
            raise ModelError(
                f"{self.name}: {whole} has {shape[0]} rows, its parts have {size}; the file is damaged, fetch it again"
            )
        return (len(rows), *shape[1:])

    def rows(self, role: str, low: int, high: int) -> Tensor:
        return self._read(self.inner.rows, role, low, high)

    def vector(self, role: str) -> Tensor:
        return self.inner.vector(role)

    def stored_blocks(self, role: str) -> StoredBlocks | None:
        return self.inner.stored_blocks(self._whole(role)[0])

    def blocks(self, role: str, low: int, high: int) -> Tensor:
        return self._read(self.inner.blocks, role, low, high)

    def _read(self, read: Callable[[str, int, int], Tensor], role: str, low: int, high: int) -> Tensor:
        whole, rows = self._whole(role)
        if rows is None or low == high:
            return read(whole, low, high)
        own = rows[low:high]
        first = int(own.min())
        return read(whole, first, int(own.max()) + 1)[own - first]

    def _whole(self, role: str) -> tuple[str, np.ndarray | None]:
        """The role of the matrix that holds ``role``, and which of its rows these are; None: all."""
        layer, dot, part = role.rpartition(".")
        whole, rows = self._rows.get(part, (part, None))
        return layer + dot + whole, rows


def by_parts(source: TensorSource) -> TensorSource:
    """``source``, or a `FusedSource` over it if it holds fused matrices, as some families' files do."""
    mlp = "experts.0." if source.config.experts else ""
    fused = source.config.family in ("phi3", "granitemoe") and not source.has(f"layers.0.{mlp}gate")
    return FusedSource(source) if fused else source


class Checkpoint(Protocol):
    """Where a model's tensors and tokenizer are read from."""

    name: str
    """The model's name in messages and cache files."""
    path: Path
    """The file or folder; for a model without one, a name in its place."""
    place: Path
    """The same path for all versions of the model: packed weights replace those of another version."""
    keeps_packed: bool = True
    """Whether packed weights are cached on disk, so that the next load is faster."""

    def fingerprint(self) -> str:
        """SHA-256 over what identifies the content without reading all of it (names, sizes, times, headers)."""

    def open(self) -> TensorSource:
        """The tensors; raises ModelError."""

    def tokenizer(self, cache_dir: Path) -> Tokenizer:
        """The tokenizer; raises ModelError. A converted one is cached in ``cache_dir``."""


@contextmanager
def well_formed(where: str) -> Iterator[None]:
    """Turns the errors of malformed values into ModelError, so that code inside need not check each value.

    Raises:
        ModelError: a value has the wrong type or range; the text begins with ``where``.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ModelError(f"{where}: holds a value of the wrong kind ({reason}); correct it or fetch it again") from None


def positive_int(where: str, value: Any, most: int) -> int:
    """``value``; ModelError, which begins with ``where``, unless it is an integer from 1 to ``most``."""
    if type(value) is not int or not 0 < value <= most:
        raise ModelError(f"{where} must be a positive integer, at most {most}, got {value!r:.100}")
    return value


def finite(where: str, tensor: str, values: Tensor) -> Tensor:
    """``values`` of ``tensor``; ModelError, which begins with ``where``, unless all are finite. Packed to integers, NaN
    would be a number; elsewhere it leaves every answer empty."""
    # `aminmax` returns NaN if a value is NaN, and takes a tenth of the time of `isfinite` over all values.
    if values.numel() and not all(each.isfinite() for each in values.aminmax()):
        raise ModelError(f"{where}: tensor {tensor} holds values that are no finite numbers; fetch the model again")
    return values


MAX_TEXT_BYTES = 8 << 20  # of a model's text file, such as config.json or a weight index
MAX_TOKENIZER_BYTES = 48 << 20  # of tokenizer.json; Gemma 3's has 33 MB
_LFS_BYTES = 1024  # that a pointer of Git LFS may have


def check_regular(path: Path) -> os.stat_result:
    """The status of the file ``path``.

    Raises:
        ModelError: it is no regular file, whose reading may never end, stands for one in Git LFS, or cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path}: is no regular file")
        if status.st_size < _LFS_BYTES and path.read_bytes().startswith(b"version https://git-lfs."):
            raise ModelError(f"{path}: only stands for a file in Git LFS; run `git lfs pull` in its folder")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    return status


def read_text_file(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The UTF-8 text of a model's file.

    Raises:
        ModelError: it is no regular file, is larger than ``max_bytes``, or cannot be read.
    """
    size = check_regular(path).st_size
    if size > max_bytes:
        raise ModelError(f"{path}: has {size} bytes, where at most {max_bytes} are expected; fetch the model again")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); correct it or fetch it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``; ModelError if it is missing, too large or no JSON object."""
    if not path.exists():
        raise ModelError(f"{path.parent}: no {path.name}; name a Hugging Face model folder or a .gguf file")
    text = read_text_file(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); correct it or fetch it again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object; correct it or fetch it again")
    return data


_EDGE_BYTES = 64 << 10  # a weight file's head holds its header, with the place of every tensor


def fingerprint_files(paths: Iterable[Path]) -> str:
    """SHA-256 over name, size, modification time and the first and last 64 KiB of each file."""
    digest = hashlib.sha256()
    for path in paths:
        status = check_regular(path)
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        try:
            with path.open("rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                file.seek(max(status.st_size - _EDGE_BYTES, 0))
                digest.update(file.read(_EDGE_BYTES))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()
