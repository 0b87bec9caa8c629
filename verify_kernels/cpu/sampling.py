"""The native sampler behind the `SamplingKernels` protocol."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_uint64, c_void_p

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.row_sampling import RowSampling
from verify_kernels.sampling_kernels import MAX_WIDTH, NO_TOKEN

_PLACE = struct.Struct("<qii")
_NO_EDITS = bytes(72)
_LOGITS = (c_void_p, c_int64, c_int, c_int, c_int)  # pointer, row stride, rows, vocabulary, threads
_SIGNATURES = {
    "sd_sample_greedy": (*_LOGITS, c_void_p),
    "sd_sample_rows": (*_LOGITS, c_void_p, c_void_p, c_void_p),
    "sd_sample_children": (*_LOGITS, c_void_p, c_void_p, c_int, c_void_p, c_void_p),
    "sd_sample_logprobs": (*_LOGITS, c_void_p, c_int, c_void_p, c_void_p, c_void_p),
    "sd_noise_gumbel": (c_uint64, c_uint64, c_int, c_void_p),
}


class NativeSampling:
    """C++ kernels of `csrc/sampling.cpp`; ``library`` is what `load_library` returned.

    Rows are packed into one contiguous array per call; arrays they point to live in their `SequenceEdits`, which the
    caller's rows keep alive for the call.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None

    def greedy(self, logits: Tensor, threads: int) -> NDArray[np.int32]:
        """Argmax per row."""
        tokens = np.empty(logits.shape[0], np.int32)
        self._library.sd_sample_greedy(*_where(logits, threads), tokens.ctypes.data)
        return tokens

    def sample(self, logits: Tensor, rows: Sequence[RowSampling], threads: int) -> NDArray[np.int32]:
        """One token per row."""
        tokens = np.empty(len(rows), np.int32)
        records, path = _pack(rows)
        self._library.sd_sample_rows(*_where(logits, threads), records, path.ctypes.data, tokens.ctypes.data)
        return tokens

    def children(
        self, logits: Tensor, rows: Sequence[RowSampling], width: int, threads: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The best ``width`` <= 64 tokens per row and their log-probabilities."""
        _check_width("width", width)
        ids, values = np.empty((len(rows), width), np.int32), np.empty((len(rows), width))
        records, path = _pack(rows)
        self._library.sd_sample_children(
            *_where(logits, threads), records, path.ctypes.data, width, ids.ctypes.data, values.ctypes.data
        )
        return ids, values

    def logprobs(
        self, logits: Tensor, tokens: NDArray[np.int32], top: int, threads: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]:
        """log softmax of the unprocessed logits."""
        _check_width("top", top)
        tokens = np.ascontiguousarray(tokens, np.int32)
        chosen = np.empty(len(tokens))
        ids, values = np.full((len(tokens), top), NO_TOKEN, np.int32), np.empty((len(tokens), top))
        self._library.sd_sample_logprobs(
            *_where(logits, threads), tokens.ctypes.data, top, chosen.ctypes.data, ids.ctypes.data, values.ctypes.data
        )
        return chosen, ids, values

    def gumbel(self, seed: int, position: int, vocab: int) -> NDArray[np.float32]:
        """The noise of every token, float32 [vocab]; the kernels above compute only what they need of it."""
        noise = np.empty(vocab, np.float32)
        self._library.sd_noise_gumbel(seed, position, vocab, noise.ctypes.data)
        return noise


def _where(logits: Tensor, threads: int) -> tuple[int, int, int, int, int]:
    return logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1], threads


def _pack(rows: Sequence[RowSampling]) -> tuple[bytes, NDArray[np.int32]]:
    parts: list[bytes] = []
    path: list[int] = []
    for row in rows:
        parts.append(row.policy.record)
        parts.append(_PLACE.pack(row.position, len(path) // 2, len(row.path) // 2))
        parts.append(_NO_EDITS if row.edits is None else row.edits.record(row.ban, row.mask))
        path.extend(row.path)
    return b"".join(parts), np.asarray(path, np.int32)


def _check_width(name: str, width: int) -> None:
    if not 0 <= width <= MAX_WIDTH:
        raise ValueError(f"{name}: must be within 0 to {MAX_WIDTH}, got {width}")
