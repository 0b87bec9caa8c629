"""Weights in blocks, repacked without rounding for the CPU kernels.

The formats are those of GGUF files (Q4_K, Q6_K, ...), U4 for GPTQ, AWQ and compressed-tensors folders, and Q3_0 for
draft models. A *unit* is 64 inputs (256 of the K formats, 128 of U4 and Q3_0) of 16 output channels, a *group* 32
inputs. Bytes of four neighbouring inputs stay together, channel after channel, so that one load serves 16 channels;
scales follow the levels.
`csrc/quant_formats.h` reads these layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

TILE = 32  # output channels that are packed together: two halves of 16, their units interleaved
GROUP = 32

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block format in the file and repacked."""

    block: int  # inputs of a block
    block_bytes: int  # of a block in the file
    unit: int  # inputs of a unit
    unit_bytes: int  # of a unit, for 16 rows
    offset: int  # subtracted from every level
    scaled: int = GROUP  # inputs that share a scale
    low: bool = False  # whether groups have a low end, which is subtracted
    halfs: tuple[int, ...] = (0,)  # bytes of a block at which a float16 begins


FORMATS: Final[dict[str, BlockFormat]] = {
    "q4_0": BlockFormat(32, 18, 64, 576, 8),
    "q4_1": BlockFormat(32, 20, 64, 640, 0, low=True, halfs=(0, 2)),
    "q5_0": BlockFormat(32, 22, 64, 704, 16),
    "q5_1": BlockFormat(32, 24, 64, 768, 0, low=True, halfs=(0, 2)),
    "q8_0": BlockFormat(32, 34, 64, 1088, 128),
    "q4_k": BlockFormat(256, 144, 256, 2368, 0, low=True, halfs=(0, 2)),
    "q5_k": BlockFormat(256, 176, 256, 2880, 0, low=True, halfs=(0, 2)),
    "q6_k": BlockFormat(256, 210, 256, 3392, 32, scaled=16, halfs=(208,)),
    # u4_N: a float16 scale, a zero point of one byte, and N levels of four bits, the low halves of bytes first;
    # w = scale * (level - zero point). Checkpoint sources build such blocks from their files' layouts.
    "u4_32": BlockFormat(32, 19, 128, 1216, 0, low=True),
    "u4_64": BlockFormat(64, 35, 128, 1152, 0, low=True),
    "u4_128": BlockFormat(128, 67, 128, 1088, 0, low=True),
    # A float16 scale and 32 levels of three bits, each from the low bits of the bytes up; w = scale * (level - 4).
    "q3_0": BlockFormat(32, 14, 128, 896, 4),
}


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """w = scale * levels - low."""

    levels: NDArray[np.int16]  # [n, k], the offset subtracted
    scale: NDArray[np.float32]  # [n, k / scaled]
    low: NDArray[np.float32]  # [n, k / 32], 0 in formats without

    def dequantised(self) -> NDArray[np.float32]:
        """float32 [n, k]."""
        k = self.levels.shape[1]
        scaled = self.levels.astype(np.float32) * np.repeat(self.scale, k // self.scale.shape[1], axis=1)
        return scaled - np.repeat(self.low, k // self.low.shape[1], axis=1)


def packed_shape(kind: str, n: int, k: int) -> tuple[int, int, int, int]:
    """[tiles, units, 2, bytes] of a packed matrix [n, k]."""
    layout = FORMATS[kind]
    return -(-n // TILE), -(-k // layout.unit), 2, layout.unit_bytes


def sample_blocks(kind: str, n: int, k: int, generator: np.random.Generator) -> Bytes:
    """Random rows of blocks, uint8 [n, bytes of a row]; float16 scales lie within 0.05 of zero."""
    layout = FORMATS[kind]
    raw = generator.integers(0, 256, (n, -(-k // layout.block), layout.block_bytes), dtype=np.uint8)
    for at in layout.halfs:
        halfs = generator.uniform(-0.05, 0.05, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = halfs[..., None].view(np.uint8)
    if kind.startswith("u4"):
        raw[..., 2] %= 17
    return raw.reshape(n, -1)


def pack_blocks(raw: Bytes, kind: str) -> Bytes:
    """Repack rows of whole blocks [n, row bytes] to `packed_shape`. Padding dequantises to zeros."""
    layout = FORMATS[kind]
    n, blocks = raw.shape[0], raw.shape[1] // layout.block_bytes
    tiles, units, _, size = packed_shape(kind, n, blocks * layout.block)
    padded = np.zeros((tiles * TILE, units * layout.unit // layout.block * layout.block_bytes), np.uint8)
    padded[:n, : raw.shape[1]] = raw
    by_unit = padded.reshape(tiles, 2, 16, units, -1, layout.block_bytes)
    out = np.empty((tiles, units, 2, size), np.uint8)
    at = 0
    for part in _parts(kind, by_unit):
        piece = np.ascontiguousarray(part).view(np.uint8).reshape(tiles, units, 2, -1)
        out[..., at : at + piece.shape[-1]] = piece
        at += piece.shape[-1]
    out[..., at:] = 0  # units are whole cache lines
    assert size - at < 64, kind
    return out


def _parts(kind: str, raw: Bytes) -> list[NDArray[Any]]:
    """raw: [tiles, 2, 16, units, blocks, block bytes]."""
    if kind.endswith("_k"):
        return _k_parts(kind, raw[..., 0, :])
    if kind == "q3_0":
        return _q3_parts(raw)
    return _u4_parts(raw) if kind.startswith("u4") else _simple_parts(kind, raw)


def unpack_blocks(packed: Bytes, kind: str, n: int, k: int) -> BlockMatrix:
    """``packed``, of n channels and k inputs, unpacked."""
    layout = FORMATS[kind]
    tiles, units = packed.shape[:2]
    unpack = _unpack_k if kind.endswith("_k") else _UNPACK.get(kind[:2], _unpack_simple)
    levels, scale, low = unpack(packed, kind)

    def rows(values: NDArray[Any], width: int, inputs: int) -> NDArray[Any]:
        """[tiles, units, 2, width, 16] as [n, inputs / inputs of a value]."""
        moved = values.reshape(tiles, units, 2, width, 16).transpose(0, 2, 4, 1, 3)
        return moved.reshape(tiles * TILE, units * width)[:n, : -(-k // inputs)]

    groups = layout.unit // GROUP
    if low is None:
        low = np.zeros((tiles, units, 2, groups, 16), np.float32)
    return BlockMatrix(
        rows(levels, layout.unit, 1).astype(np.int16) - np.int16(layout.offset),
        rows(scale, layout.unit // layout.scaled, layout.scaled).astype(np.float32),
        rows(low, groups, GROUP).astype(np.float32),
    )


def _words(values: NDArray[Any]) -> NDArray[np.int32]:
    """[tiles, 2, 16, units, bytes] as [tiles, units, 2, words, 16]."""
    return np.ascontiguousarray(values).view(np.int32).transpose(0, 3, 1, 4, 2)


def _each(values: NDArray[Any]) -> NDArray[Any]:
    """[tiles, 2, 16, units, values] as [tiles, units, 2, values, 16]."""
    return values.transpose(0, 3, 1, 4, 2)


def _halfs(values: Bytes) -> NDArray[Any]:
    return np.ascontiguousarray(values).view(np.float16)


def _k_parts(kind: str, raw: Bytes) -> list[NDArray[Any]]:
    """raw: [tiles, 2, 16, units, block bytes]."""
    if kind == "q6_k":
        largest = _halfs(raw[..., 208:]).astype(np.float32)
        return [_words(raw[..., :128]), _words(raw[..., 128:192]), _each(raw[..., 192:208]), _each(largest)]
    # Twelve bytes hold eight scales and eight low ends of six bits each.
    a, b, c = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scale = np.concatenate((a & 63, (c & 15) | (a >> 6) << 4), axis=-1)
    low = np.concatenate((b & 63, (c >> 4) | (b >> 6) << 4), axis=-1)
    levels = [_words(raw[..., 48:]), _words(raw[..., 16:48])] if kind == "q5_k" else [_words(raw[..., 16:])]
    return [*levels, _each(scale), _each(low), _each(_halfs(raw[..., 0:4]))]


def _simple_parts(kind: str, raw: Bytes) -> list[NDArray[Any]]:
    """raw: [tiles, 2, 16, units, 2, block bytes]."""
    head = {"q4_0": 2, "q4_1": 4, "q5_0": 6, "q5_1": 8, "q8_0": 2}[kind]
    scale = _each(_halfs(raw[..., 0:2])[..., 0])
    if kind == "q8_0":
        return [_words((raw[..., head:] ^ 0x80).reshape(*raw.shape[:4], -1)), scale]
    stored = raw[..., head:]
    levels = np.concatenate((stored & 15, stored >> 4), axis=-1)  # of 16 bytes the high halves follow the low ones
    parts: list[NDArray[Any]] = [_words(levels[..., 0, :] | levels[..., 1, :] << 4)]
    if kind.startswith("q5"):
        # Bit j of byte i is of input 4 j + i: every fourth bit of a word, moved together.
        word = np.ascontiguousarray(raw[..., head - 4 : head]).view(np.uint32)
        planes: NDArray[Any] = word >> np.arange(4, dtype=np.uint32)
        for mask, distance in ((0x11111111, 3), (0x03030303, 6), (0x000F000F, 12)):
            planes = (planes & mask) | (planes & mask) >> distance
        parts.append(_words(planes.astype(np.uint8).reshape(*raw.shape[:4], -1)))
    parts.append(scale)
    if FORMATS[kind].low:
        parts.append(_each(-_halfs(raw[..., 2:4])[..., 0]))  # the file stores the negated value, which is added
    return parts


def _u4_parts(raw: Bytes) -> list[NDArray[Any]]:
    levels = np.stack((raw[..., 3:] & 15, raw[..., 3:] >> 4), axis=-1).reshape(*raw.shape[:4], 2, 2, GROUP)
    pairs = levels[..., 0, :] | levels[..., 1, :] << 4
    return [_words(pairs.reshape(*raw.shape[:4], -1)), _each(_halfs(raw[..., 0:2])[..., 0]), _each(raw[..., 2])]


def _q3_parts(raw: Bytes) -> list[NDArray[Any]]:
    """raw: [tiles, 2, 16, units, 4, 14]."""
    three = np.moveaxis(raw[..., 2:].reshape(*raw.shape[:5], 4, 3), 4, 0).astype(np.uint32)
    eight = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16  # levels, one after the other
    levels = np.stack([(eight >> shift & 7).astype(np.uint8) for shift in range(0, 24, 3)], axis=-1)
    first, second, third, fourth = levels.reshape(4, *raw.shape[:4], GROUP)
    pairs = (fourth & 1).reshape(*raw.shape[:4], 4, 2, 4)
    ones = (pairs[..., 0, :] << 6 | pairs[..., 1, :] << 7).reshape(*raw.shape[:4], 16)
    low = first | second << 3 | fourth >> 1 << 6
    return [
        _words(np.concatenate((low, third[..., :16] | third[..., 16:] << 3 | ones), axis=-1)),
        _each(_halfs(raw[..., 0:2])[..., 0]),
    ]


def _bytes_of(words: Bytes) -> Bytes:
    """[..., words * 64], a word for each of 16 channels, as [..., words * 4, 16]: inputs in order, by channel."""
    shape = words.shape[:-1]
    return words.reshape(*shape, -1, 16, 4).swapaxes(-1, -2).reshape(*shape, -1, 16)


def _unpack_k(packed: Bytes, kind: str) -> tuple[Bytes, NDArray[np.float32], NDArray[np.float32] | None]:
    shape = packed.shape[:3]
    low4 = _bytes_of(packed[..., :2048])
    if kind == "q6_k":
        pairs, plane = (
            low4.reshape(*shape, 2, 1, 64, 16),
            _bytes_of(packed[..., 2048:3072]).reshape(*shape, 2, 1, 32, 16),
        )
        four = np.concatenate((pairs & 15, pairs >> 4), axis=-3).reshape(*shape, 2, 4, 32, 16)
        two = (plane >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1, 1)) & 3
        whole = np.ascontiguousarray(packed[..., 3328:]).view(np.float32).reshape(*shape, 1, 16)
        parts = packed[..., 3072:3328].view(np.int8).reshape(*shape, 16, 16)
        return four | two << 4, parts.astype(np.float32) * whole, None
    pairs = low4.reshape(*shape, 4, 1, 32, 16)
    levels = np.concatenate((pairs & 15, pairs >> 4), axis=-3).reshape(*shape, 8, 32, 16)
    if kind == "q5_k":
        plane = _bytes_of(packed[..., 2048:2560]).reshape(*shape, 1, 32, 16)
        levels = levels | ((plane >> np.arange(8, dtype=np.uint8).reshape(8, 1, 1)) & 1) << 4
    small = packed[..., -320:]
    ends = _halfs(small[..., 256:]).astype(np.float32).reshape(*shape, 2, 1, 16)
    scales = small[..., :256].reshape(*shape, 2, 8, 16).astype(np.float32) * ends
    return levels, scales[..., 0, :, :], scales[..., 1, :, :]


def _unpack_simple(packed: Bytes, kind: str) -> tuple[Bytes, NDArray[np.float32], NDArray[np.float32] | None]:
    shape = packed.shape[:3]
    ends = 2 if FORMATS[kind].low else 1
    small = _halfs(packed[..., -64 * ends :]).astype(np.float32).reshape(*shape, ends, 2, 16)
    scale, low = small[..., 0, :, :], small[..., 1, :, :] if ends == 2 else None
    if kind == "q8_0":
        return _bytes_of(packed[..., :1024]), scale, low
    pairs = _bytes_of(packed[..., :512]).reshape(*shape, 1, 32, 16)
    levels = np.concatenate((pairs & 15, pairs >> 4), axis=-3)
    if kind.startswith("q5"):
        planes = packed[..., 512:640].reshape(*shape, 2, 1, 16, 4).swapaxes(-1, -2)  # bit j of byte b: input 4j + b
        bits = (planes >> np.arange(8, dtype=np.uint8).reshape(8, 1, 1)) & 1
        levels = levels | bits.reshape(*shape, 2, 32, 16) << 4
    return levels, scale, low


def _unpack_u4(packed: Bytes, kind: str) -> tuple[Bytes, NDArray[np.float32], NDArray[np.float32] | None]:
    shape, ends = packed.shape[:3], 128 // FORMATS[kind].block
    pairs = _bytes_of(packed[..., :1024]).reshape(*shape, 2, 1, GROUP, 16)
    small = packed[..., 1024 : 1024 + 48 * ends]
    scale = _halfs(small[..., : 32 * ends]).astype(np.float32).reshape(*shape, ends, 16)
    low = scale * small[..., 32 * ends :].reshape(*shape, ends, 16)
    each = np.arange(4) * ends // 4  # of the unit's groups
    return np.concatenate((pairs & 15, pairs >> 4), axis=-3), scale[..., each, :], low[..., each, :]


def _unpack_q3(packed: Bytes, kind: str) -> tuple[Bytes, NDArray[np.float32], NDArray[np.float32] | None]:
    shape = packed.shape[:3]
    low, last = np.split(_bytes_of(packed[..., :768]), [GROUP], axis=-2)
    ones = last.reshape(*shape, 4, 1, 4, 16) >> np.array([6, 7], np.uint8).reshape(2, 1, 1) & 1
    fourth = low >> 6 << 1 | ones.reshape(*shape, GROUP, 16)
    third = np.concatenate((last & 7, last >> 3 & 7), axis=-2)
    levels = np.stack((low & 7, low >> 3 & 7, third, fourth), axis=-3)
    scale = _halfs(packed[..., 768:]).astype(np.float32).reshape(*shape, 4, 16)
    return levels, scale, None


_UNPACK = {"u4": _unpack_u4, "q3": _unpack_q3}
