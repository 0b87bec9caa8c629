"""Hashes by which keys are known without being kept."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass

KEY_PREFIX = "sd-"
_KEY_BYTES = 32
_SALT_BYTES = 16
_SCRYPT_COST = (1 << 14, 8, 1)  # 16 MiB and some 50 ms
_MOST_SCRYPT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class KeyHash:
    """``sha256:HEX`` for keys of high entropy, ``scrypt:N:R:P:SALT:HASH`` (base64) for those that people choose.

    ``digest`` is the hash itself; ``salt`` and ``cost`` (n, r, p) are scrypt's.
    """

    digest: bytes
    salt: bytes = b""
    cost: tuple[int, int, int] = (0, 0, 0)

    @property
    def slow(self) -> bool:
        """Whether `matches` takes tens of milliseconds and megabytes."""
        return bool(self.salt)

    def matches(self, key: str) -> bool:
        """Whether this is the hash of ``key``; takes as long whether it is or not."""
        return hmac.compare_digest(self.digest, self._hash(key) if self.slow else fast_digest(key))

    def __str__(self) -> str:
        if not self.slow:
            return f"sha256:{self.digest.hex()}"
        return ":".join(["scrypt", *map(str, self.cost), _text(self.salt), _text(self.digest)])

    @staticmethod
    def parse(text: str) -> KeyHash:
        """The inverse of ``str``.

        Raises:
            ValueError: it is none.
        """
        try:
            match text.split(":"):
                case ["sha256", digest] if len(digest) == 64:
                    return KeyHash(bytes.fromhex(digest))
                case ["scrypt", n, r, p, salt, digest]:
                    return _checked(KeyHash(_bytes(digest), _bytes(salt), (int(n), int(r), int(p))))
        except (ValueError, binascii.Error):
            pass
        raise ValueError("must be sha256:HEX or scrypt:N:R:P:SALT:HASH, as `specdec keys new` writes it")

    @staticmethod
    def of(key: str, *, slow: bool = False) -> KeyHash:
        """The hash to keep of ``key``."""
        if not slow:
            return KeyHash(fast_digest(key))
        salt = secrets.token_bytes(_SALT_BYTES)
        return KeyHash(KeyHash(b"", salt, _SCRYPT_COST)._hash(key), salt, _SCRYPT_COST)

    def _hash(self, key: str) -> bytes:
        n, r, p = self.cost
        return hashlib.scrypt(
            key.encode("utf-8", "surrogatepass"), salt=self.salt, n=n, r=r, p=p, maxmem=_MOST_SCRYPT_BYTES * 2, dklen=32
        )


def fast_digest(key: str) -> bytes:
    """SHA-256 of ``key``, 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def new_key() -> str:
    """A key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def _checked(found: KeyHash) -> KeyHash:
    n, r, p = found.cost
    sound = n > 1 and n & (n - 1) == 0 and r > 0 and 0 < p <= 16 and 128 * n * r <= _MOST_SCRYPT_BYTES
    if not sound or len(found.digest) != 32 or len(found.salt) < 8:
        raise ValueError("scrypt: N must be a power of two, 128 N R at most 256 MiB, the hash 32 bytes, the salt 8")
    return found


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
