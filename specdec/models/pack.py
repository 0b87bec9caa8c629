"""Packs a checkpoint's tensors into the layout of the CPU kernels, and caches packed weights on disk."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch import Tensor

from specdec.config import WeightDtype
from specdec.control_groups import usable_cores
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import Checkpoint, TensorSource, finite
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.progress import Progress
from specdec.models.vocabulary_cut import CutCheckpoint, CutSource, VocabularyCut
from specdec.models.weights import (
    ArraySpec,
    LinearPiece,
    LinearPlan,
    WeightsBuffer,
    align,
    has_bias,
    layout_bytes,
    linear_pieces,
    norm_plans,
    plan_layout,
    tensor_shapes,
)
from verify_kernels.packed_weights import (
    TILE_N,
    BlockKind,
    DraftKind,
    PackedLinear,
    RoundBlocks,
    RoundedKind,
    pack_block_linear,
    pack_linear,
    round_blocks,
)
from verify_kernels.quant_formats import FORMATS


@contextmanager
def conversion_pool() -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread per core. Meanwhile torch runs each operation on one thread, not on a nested team."""
    intra_op = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(usable_cores()) as pool:
            yield pool
    finally:
        torch.set_num_threads(intra_op)


SLICE_VALUES = 1 << 20  # values converted at a time: few enough for the cache, enough to amortise calls


def pack_model(
    source: TensorSource, dtype: WeightDtype, progress: Progress, round_blocks: RoundBlocks = round_blocks
) -> WeightsBuffer:
    """Pack every tensor of ``source`` into a new buffer. Beside the buffer only slices are held in memory.

    Raises:
        ModelError: a tensor is missing, its shape does not fit the configuration, or it holds no numbers.
        UnsupportedModelError: see `check_dimensions`.
    """
    check_shapes(source)
    buffer = WeightsBuffer(plan_layout(source, dtype))
    for role, _ in norm_plans(source.config):
        buffer.view(role).copy_(finite(source.name, role, source.vector(role)))
    if isinstance(source, CutSource):
        buffer.view("output_ids").copy_(torch.from_numpy(source.output_ids))
    jobs = _Packing(source, buffer, round_blocks).jobs(dtype)
    label, total, done = f"packing {source.name} ({dtype})", sum(size for size, _ in jobs), 0
    with conversion_pool() as pool:
        futures = {pool.submit(job): size for size, job in jobs}
        try:
            for future in as_completed(futures):
                future.result()
                done += futures[future]
                progress(label, done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return buffer


MAX_HEAD_DIM = 256  # values in a head; the CPU attention kernel's buffers hold no more


def check_dimensions(name: str, config: ModelConfig) -> None:
    """UnsupportedModelError unless the CPU kernels support the heads and the experts."""
    if config.experts and (config.hidden_size % TILE_N or 2 * config.intermediate_size % TILE_N):
        raise UnsupportedModelError(
            f"{name}: experts of {config.hidden_size} x {config.intermediate_size} are not supported; the first must "
            f"be a multiple of {TILE_N}, the second one of {TILE_N // 2}"
        )
    if config.head_dim % 2 or config.head_dim > MAX_HEAD_DIM or config.n_heads % config.n_kv_heads:
        raise UnsupportedModelError(
            f"{name}: {config.n_heads} heads of {config.head_dim} over {config.n_kv_heads} KV heads are not supported; "
            f"heads must be even, at most {MAX_HEAD_DIM} wide, and a multiple of the KV heads"
        )


def check_shapes(source: TensorSource) -> None:
    """ModelError unless every tensor of the configuration exists and has the right shape; see `check_dimensions`."""
    check_dimensions(source.name, source.config)
    shapes = tensor_shapes(source.config, lambda role: source.has(role + ".bias"))
    for role, shape in shapes.items():
        found = source.shape(role)
        if found != shape:
            raise ModelError(
                f"{source.name}: tensor {role} has shape {list(found)}, the configuration calls for {list(shape)}; "
                "the file is damaged or made by an incompatible converter"
            )


@dataclass(frozen=True, slots=True)
class _Packing:
    """Packs the matrices of ``source`` into ``buffer``, slice by slice."""

    source: TensorSource
    buffer: WeightsBuffer
    round_blocks: RoundBlocks

    def jobs(self, dtype: WeightDtype) -> list[tuple[int, Callable[[], None]]]:
        """The work: (number of values, function)."""
        jobs: list[tuple[int, Callable[[], None]]] = []
        for piece in linear_pieces(self.source, dtype):
            plan = piece.plan
            step = max(SLICE_VALUES // plan.columns // TILE_N, 1) * TILE_N
            bias = fused_bias(self.source, plan) if has_bias(plan, self.source) else None
            if piece.order is not None:
                self.buffer.view(piece.name + ".order").copy_(piece.order)
            for low in range(0, plan.rows, step):
                high = min(low + step, plan.rows)
                jobs.append(((high - low) * plan.columns, partial(self._pack, piece, low, high, bias)))
        embed = self.buffer.find("embed")
        if embed is not None:
            vocab, hidden = embed.shape
            step = max(SLICE_VALUES // hidden, 1)
            for low in range(0, vocab, step):
                high = min(low + step, vocab)
                jobs.append(((high - low) * hidden, partial(self._copy_embedding, embed, low, high)))
        return jobs

    def _pack(self, piece: LinearPiece, low: int, high: int, bias: Tensor | None) -> None:
        packed = self._packed(piece, low, high, None if bias is None else bias[low:high])
        first = low // TILE_N  # slices begin on a tile, and tiles are packed independently
        self.buffer.view(piece.name + ".data")[first : first + packed.tiles] = packed.data
        channels = slice(first * TILE_N, (first + packed.tiles) * TILE_N)
        if packed.scale is not None:
            self.buffer.view(piece.name + ".scale")[channels] = packed.scale
        if packed.bias is not None:
            self.buffer.view(piece.name + ".bias")[channels] = packed.bias

    def _packed(self, piece: LinearPiece, low: int, high: int, bias: Tensor | None) -> PackedLinear:
        if piece.kind not in FORMATS:
            return pack_linear(fused_rows(self._rows, piece.plan, low, high), bias, cast(RoundedKind, piece.kind))
        blocks = fused_rows(lambda role, *rows: self._blocks(role, piece.kind, *rows), piece.plan, low, high)
        return pack_block_linear(blocks, bias, cast(BlockKind, piece.kind), piece.plan.columns)

    def _copy_embedding(self, embed: Tensor, low: int, high: int) -> None:
        embed[low:high] = self._rows("embed", low, high)

    def _blocks(self, role: str, kind: str, low: int, high: int) -> Tensor:
        """Rows of ``role`` in the block format ``kind``: stored in it, or rounded to it."""
        stored = self.source.stored_blocks(role)
        if stored is not None and stored.kind == kind:
            blocks, layout = self.source.blocks(role, low, high), FORMATS[kind]
            for at in layout.halfs:
                scales = blocks.unflatten(1, (-1, layout.block_bytes))[..., at : at + 2].contiguous()
                finite(self.source.name, role, scales.view(torch.float16))
            return blocks
        return self.round_blocks(self._rows(role, low, high), cast(DraftKind, kind))

    def _rows(self, role: str, low: int, high: int) -> Tensor:
        """Rows of ``role``, float32."""
        return finite(self.source.name, role, self.source.rows(role, low, high))


def fused_rows(rows: Callable[[str, int, int], Tensor], plan: LinearPlan, low: int, high: int) -> Tensor:
    """Rows [low, high) of a fused matrix; ``rows`` returns those of one of its roles."""
    pieces, start = [], 0
    for role, count in plan.parts:
        first, last = max(low - start, 0), min(high - start, count)
        if first < last:
            pieces.append(rows(role, first, last))
        start += count
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def fused_bias(source: TensorSource, plan: LinearPlan) -> Tensor:
    """The bias of the fused layer, float32; zeros for parts without one."""
    pieces = [
        finite(source.name, bias, source.vector(bias)) if source.has(bias) else torch.zeros(count)
        for bias, count in ((role + ".bias", count) for role, count in plan.parts)
    ]
    return torch.cat(pieces)


_MAGIC = b"SPECDECW"
_PREAMBLE = struct.Struct("<8sQ32s")  # magic, header bytes, SHA-256 of the header
MAX_HEADER = 1 << 26  # bytes that are read of a header; real ones take about 100 per array
_CHUNK = 32 << 20  # bytes that one thread reads and checks at a time


class PackedFileError(Exception):
    """A packed file is truncated or damaged; it is packed again from the model, so users do not see this error."""


class PackedFile:
    """A packed file whose header is read and checked.

    Raises:
        PackedFileError: it is not a whole packed file for ``key``.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                header, self._start = _read_header(file)
            size = path.stat().st_size
            if header["key"] != key:
                raise PackedFileError("made for another model or version")
            self.config = _decode_config(header["config"])
            self.layout = [ArraySpec(n, d, tuple(s), o) for n, d, s, o in header["layout"]]
            self._sums: list[int] = header["sums"]
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise PackedFileError(str(error)) from None
        self.nbytes = layout_bytes(self.layout)
        self.digest = digest_of(self.layout, self._sums)
        if size != self._start + self.nbytes or len(self._sums) != len(_chunks(self.nbytes)):
            raise PackedFileError(f"{size} bytes instead of {self._start + self.nbytes}")

    def read(self, on_bytes: Callable[[int], None]) -> WeightsBuffer:
        """The weights, read into place by a thread per core; ``on_bytes`` receives the bytes read so far."""
        buffer = WeightsBuffer(self.layout)
        memory = buffer.bytes_view()

        def read_chunk(number: int, low: int, high: int) -> None:
            done = low
            while done < high:
                got = os.preadv(descriptor, [memory[done:high]], self._start + done)
                if got == 0:
                    raise PackedFileError(f"ends at byte {self._start + done}")
                done += got
            if _sum(memory[low:high], number) != self._sums[number]:
                raise PackedFileError(f"checksum of chunk {number} differs")

        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(usable_cores()) as pool:
                chunks, whole = enumerate(_chunks(self.nbytes)), 0
                futures = {pool.submit(read_chunk, i, low, high): high - low for i, (low, high) in chunks}
                for future in as_completed(futures):
                    future.result()
                    whole += futures[future]
                    on_bytes(whole)
        finally:
            os.close(descriptor)
        return buffer


def write_packed_file(path: Path, key: str, config: ModelConfig, buffer: WeightsBuffer, sums: list[int]) -> None:
    """Write the buffer atomically, under a temporary name that is then renamed. Raises OSError.

    The temporary file is locked while it is written, so that `_delete_unfinished` of another process leaves it.
    """
    # not the process's id, which two containers that share the folder may both have
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("wb") as file:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            write_packed(file, key, config, buffer, sums)
            file.flush()
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _delete_unfinished(folder: Path) -> None:
    """Delete what processes left that were killed while they wrote: the system has released their locks."""
    for path in folder.glob("*.packed.*.tmp"):
        with suppress(OSError), path.open("r+b") as file:  # it is locked, or may not be deleted
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:  # an empty one may be about to be locked
                path.unlink()


def write_packed(file: BinaryIO, key: str, config: ModelConfig, buffer: WeightsBuffer, sums: list[int]) -> None:
    """Write a packed file, as `PackedFile` reads it, to an empty file."""
    layout = [(spec.name, spec.dtype, spec.shape, spec.offset) for spec in buffer.layout]
    header = json.dumps({"key": key, "config": asdict(config), "layout": layout, "sums": sums}).encode()
    preamble = _PREAMBLE.pack(_MAGIC, len(header), hashlib.sha256(header).digest())
    file.write((preamble + header).ljust(align(len(preamble) + len(header)), b"\0"))
    file.write(buffer.bytes_view())


def sums_of(buffer: WeightsBuffer) -> list[int]:
    """The checksum of each chunk of ``buffer``."""
    memory = buffer.bytes_view()
    with ThreadPoolExecutor(usable_cores()) as pool:
        chunks = enumerate(_chunks(buffer.nbytes))
        return list(pool.map(lambda chunk: _sum(memory[slice(*chunk[1])], chunk[0]), chunks))


def digest_of(layout: list[ArraySpec], sums: list[int]) -> str:
    """SHA-256 over a buffer's layout and its chunks' checksums: equal if all weights are, bit for bit."""
    places = [(spec.name, spec.dtype, list(spec.shape), spec.offset) for spec in layout]
    return hashlib.sha256(json.dumps([places, sums]).encode()).hexdigest()


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    magic, length, digest = _PREAMBLE.unpack(file.read(_PREAMBLE.size))
    if magic != _MAGIC:
        raise PackedFileError("not a packed file")
    # A damaged length may exceed the file, or the memory.
    header = file.read(min(length, MAX_HEADER))
    if hashlib.sha256(header).digest() != digest:
        raise PackedFileError("header is damaged")
    return json.loads(header), align(_PREAMBLE.size + length)


def _chunks(nbytes: int) -> list[tuple[int, int]]:
    return [(low, min(low + _CHUNK, nbytes)) for low in range(0, nbytes, _CHUNK)]


def _sum(piece: memoryview, number: int) -> int:
    """XXH3 of chunk ``number``, seeded by it, so that swapped chunks are found too."""
    return xxhash.xxh3_64_intdigest(piece, seed=number)


def _decode_config(data: dict[str, Any]) -> ModelConfig:
    rope = data["rope"]
    scaling = None if rope["scaling"] is None else tuple(rope["scaling"])
    rebuilt = {"local_layers": tuple(data["local_layers"]), "rope": RopeConfig(**rope | {"scaling": scaling})}
    return ModelConfig(**data | rebuilt)


logger = logging.getLogger(__name__)

_FORMAT = 13  # of packed files; raise it when packing, its layout or what readers make of a configuration changes
_SPARE_BYTES = 1 << 30  # of disk that packed files leave free


class PackedCache:
    """The cached weights of one model in one dtype.

    A file's name holds a hash of the model's place and a key over its content. When the content changes, so does the
    key, and the file of the former key is deleted.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, dtype: WeightDtype) -> None:
        self._name = checkpoint.name
        self.key = hashlib.sha256(f"{checkpoint.fingerprint()}|{dtype}|{_FORMAT}".encode()).hexdigest()
        place = hashlib.sha256(str(checkpoint.place.resolve()).encode()).hexdigest()[:8]
        slug = re.sub(r"[^\w.-]", "_", checkpoint.name)[:64]
        self._folder = folder
        self._stem = f"{slug}-{dtype}-{place}"
        self.path = folder / f"{self._stem}-{self.key[:16]}.packed"

    def open(self) -> PackedFile | None:
        """The cached file with its header checked; None if there is none, or its folder cannot be read. A damaged file
        is deleted."""
        try:
            return PackedFile(self.path, self.key) if os.path.exists(self.path) else None
        except PackedFileError as error:
            self._discard(error)
            return None

    def read(self, file: PackedFile, progress: Progress) -> WeightsBuffer | None:
        """The weights of an opened file; None if they are damaged, and the file is deleted then."""
        try:
            return file.read(lambda done: progress(f"loading {self._name}", done, file.nbytes))
        except (PackedFileError, OSError) as error:
            self._discard(error)
            return None

    def write(self, config: ModelConfig, buffer: WeightsBuffer, sums: list[int]) -> None:
        """Cache the weights. A failure is only logged, since the model runs without the cache. sums: by `sums_of`."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _delete_unfinished(self._folder)
            if shutil.disk_usage(self._folder).free < buffer.nbytes + _SPARE_BYTES:
                logger.warning("%s: too little disk space to keep packed weights of %s", self._folder, self._name)
                return
            write_packed_file(self.path, self.key, config, buffer, sums)
            for stale in self._folder.glob(f"{self._stem}-*.packed"):
                if stale != self.path:
                    stale.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s: packed weights cannot be cached (%s)", self._folder, error)

    def _discard(self, error: Exception) -> None:
        """Delete a damaged file, if that is possible."""
        logger.warning("%s: cached weights are damaged (%s), packing again", self.path, error)
        with suppress(OSError):  # where the cache can only be read, the model runs without it
            self.path.unlink(missing_ok=True)


def cut_output(checkpoint: Checkpoint, cut: VocabularyCut, dtype: WeightDtype, cache_dir: Path) -> Checkpoint:
    """``checkpoint`` with its output table cut, if ``cut`` is for its vocabulary."""
    found = CutCheckpoint(checkpoint, cut.ids)
    if os.path.exists(PackedCache(cache_dir / "packed", found, dtype).path):
        return found  # written when it was checked
    same = checkpoint.tokenizer(cache_dir).fingerprint == cut.fingerprint
    return found if same and cut.ids[-1] < checkpoint.open().config.vocab_size else checkpoint
