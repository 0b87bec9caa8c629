"""A file of packed weights: a small JSON header, then the weights buffer as it lies in memory."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specdec.models.array_spec import ArraySpec
from specdec.models.layout import align, layout_bytes
from specdec.models.model_config import ModelConfig, RopeConfig
from specdec.models.weights_buffer import WeightsBuffer

_MAGIC = b"SPECDECW"
_PREAMBLE = struct.Struct("<8sQ32s")  # magic, header bytes, SHA-256 of the header
MAX_HEADER = 1 << 26  # bytes; real ones take some 100 per array
_CHUNK = 32 << 20  # bytes read and summed by one thread at a time


class PackedFileError(Exception):
    """A packed file is truncated or damaged; it is rebuilt from the model, so users do not see this."""


class PackedFile:
    """An existing packed file, its header read and checked.

    Raises:
        PackedFileError: it is not a whole packed file made for ``key``.
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
            self._layout = [ArraySpec(n, d, tuple(s), o) for n, d, s, o in header["layout"]]
            self._sums: list[int] = header["sums"]
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise PackedFileError(str(error)) from None
        self.nbytes = layout_bytes(self._layout)
        if size != self._start + self.nbytes or len(self._sums) != len(_chunks(self.nbytes)):
            raise PackedFileError(f"{size} bytes instead of {self._start + self.nbytes}")

    def read(self, on_bytes: Callable[[int], None]) -> WeightsBuffer:
        """The weights, read straight into place by a few threads; ``on_bytes`` hears how many more are done."""
        buffer = WeightsBuffer(self._layout)
        memory = buffer.bytes_view()

        def read_chunk(low: int, high: int) -> int:
            done = low
            while done < high:
                got = os.preadv(descriptor, [memory[done:high]], self._start + done)
                if got == 0:
                    raise PackedFileError(f"ends at byte {self._start + done}")
                done += got
            return _sum(memory[low:high])

        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                chunks = _chunks(self.nbytes)
                futures = {pool.submit(read_chunk, *chunk): i for i, chunk in enumerate(chunks)}
                for future in as_completed(futures):
                    i = futures[future]
                    if future.result() != self._sums[i]:
                        raise PackedFileError(f"checksum of chunk {i} differs")
                    on_bytes(chunks[i][1] - chunks[i][0])
        finally:
            os.close(descriptor)
        return buffer


def write_packed_file(path: Path, key: str, config: ModelConfig, buffer: WeightsBuffer) -> None:
    """Write the buffer under a temporary name and rename it, so that nobody sees a part of it. Raises OSError."""
    memory = buffer.bytes_view()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sums = list(pool.map(lambda chunk: _sum(memory[chunk[0] : chunk[1]]), _chunks(buffer.nbytes)))
    layout = [(spec.name, spec.dtype, spec.shape, spec.offset) for spec in buffer.layout]
    header = json.dumps({"key": key, "config": asdict(config), "layout": layout, "sums": sums}).encode()
    preamble = _PREAMBLE.pack(_MAGIC, len(header), hashlib.sha256(header).digest())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write((preamble + header).ljust(align(len(preamble) + len(header)), b"\0"))
            file.write(memory)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    magic, length, digest = _PREAMBLE.unpack(file.read(_PREAMBLE.size))
    if magic != _MAGIC:
        raise PackedFileError("not a packed file")
    # A damaged length may ask for more than any file holds, or any memory.
    header = file.read(min(length, MAX_HEADER))
    if hashlib.sha256(header).digest() != digest:
        raise PackedFileError("header is damaged")
    return json.loads(header), align(_PREAMBLE.size + length)


def _chunks(nbytes: int) -> list[tuple[int, int]]:
    return [(low, min(low + _CHUNK, nbytes)) for low in range(0, nbytes, _CHUNK)]


def _sum(piece: memoryview) -> int:
    """Sum of the 64-bit words, modulo 2^64: at memory speed, and any single damaged word changes it."""
    return int(np.add.reduce(np.frombuffer(piece, dtype=np.uint64), dtype=np.uint64))


def _decode_config(data: dict[str, Any]) -> ModelConfig:
    rope = data["rope"]
    scaling = None if rope["scaling"] is None else tuple(rope["scaling"])
    tuples = {name: tuple(data[name]) for name in ("sliding_layers", "eos_ids")}
    return ModelConfig(**data | tuples | {"rope": RopeConfig(rope["theta"], rope["local_theta"], scaling)})
