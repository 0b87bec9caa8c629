"""Seeds of requests and of their samples. Imports no torch, since clients need them too."""

from __future__ import annotations

import hashlib
import secrets


def draw_seed() -> int:
    """A random seed for a request that gives none; 53 bits, which JavaScript numbers hold exactly."""
    return secrets.randbits(53)


def sample_seed(seed: int, index: int) -> int:
    """The unsigned 64-bit seed of sample ``index`` of a request: ``seed`` itself for 0, else a hash of the two."""
    if index == 0:
        return seed
    material = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")
