"""What a checkpoint format must offer: a config, a tokenizer, tensors read slice by slice, and a fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specdec.errors import ModelError
from specdec.models.config import ModelConfig
from specdec.models.tokenizer import Tokenizer

if TYPE_CHECKING:  # torch takes seconds, and whoever wants a tokenizer has no use for it
    from torch import Tensor

    from verify_kernels.packed_weights import BlockKind


class TensorSource(Protocol):
    """Named tensors of one checkpoint, by their role in the decoder.

    Roles: ``embed``, ``lm_head``, ``final_norm`` and ``layers.{i}.`` followed by attn_norm, q, k, v, o, q_norm,
    k_norm, attn_post_norm, mlp_norm, gate, up, down or mlp_post_norm; a bias is the role followed by ``.bias``.
    A source gives values in one convention whatever its file holds: matrices [out, in], rotary rows half-split,
    norms that multiply as they are. Reading is safe from several threads.
    """

    @property
    def name(self) -> str:
        """How messages call the model."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model's shape, without what only the tokenizer knows."""
        ...

    def has(self, role: str) -> bool:
        """Whether the checkpoint holds ``role``."""
        ...

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of ``role`` as ``rows`` or ``vector`` gives it; ModelError when it is missing."""
        ...

    def rows(self, role: str, low: int, high: int) -> Tensor:
        """Rows [low, high) of matrix ``role``, float32 [high - low, in]."""
        ...

    def vector(self, role: str) -> Tensor:
        """Vector ``role``, float32."""
        ...


@runtime_checkable
class BlockSource(TensorSource, Protocol):
    """A source that can also give matrices in the block format they are stored in, or in one that loses nothing."""

    def block_kind(self, role: str) -> BlockKind | None:
        """The block format of matrix ``role``; None where it is stored in another way."""
        ...

    def order(self, role: str) -> Tensor | None:
        """Which input stands at each place of the blocks of matrix ``role``, int64 [in]; None: they are in order."""
        ...

    def blocks(self, role: str, low: int, high: int) -> Tensor:
        """Rows [low, high) of matrix ``role`` in whole blocks, uint8 [high - low, bytes of a row]."""
        ...


class Checkpoint(Protocol):
    """Somewhere a model's tensors and tokenizer can be read from, in any of the formats."""

    @property
    def name(self) -> str:
        """How messages and cache files call the model."""
        ...

    @property
    def path(self) -> Path:
        """The file or folder; of a model that is in none, a name in its place."""
        ...

    @property
    def keeps_packed(self) -> bool:
        """Whether its packed weights are kept on disk, to load sooner the next time."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 over what identifies the content without reading all of it (names, sizes, times, headers)."""
        ...

    def open(self) -> TensorSource:
        """The tensors; raises ModelError."""
        ...

    def tokenizer(self, cache_dir: Path, config: ModelConfig | None = None, like: Tokenizer | None = None) -> Tokenizer:
        """The tokenizer, from ``cache_dir`` where it had to be converted; raises ModelError. config: the model's, where
        it was read already. like: see `Tokenizer.like`."""
        ...


@contextmanager
def well_formed(where: str) -> Iterator[None]:
    """Inside, values from a file are taken for what they should be.

    Raises:
        ModelError: one of them is something else; the message begins with ``where``.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ModelError(f"{where}: holds a value of the wrong kind ({told}); fetch the model again") from None


_EDGE_BYTES = 64 << 10  # the head holds a weight file's header, where every tensor's place is written


def fingerprint_files(paths: Iterable[Path]) -> str:
    """SHA-256 over name, size, modification time and the first and last 64 KiB of each file."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            status = path.stat()
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                file.seek(max(status.st_size - _EDGE_BYTES, 0))
                digest.update(file.read(_EDGE_BYTES))
        except OSError as error:
            raise ModelError(f"{path}: can not be read ({error.strerror})") from None
    return digest.hexdigest()
