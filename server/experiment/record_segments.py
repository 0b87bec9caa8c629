"""The files that an experiment's records lie in, in order."""

from __future__ import annotations

from pathlib import Path

MAGIC = b"SDREC\x00\x00\x01"
"""How such a file begins; the last byte is the version of its layout."""

_PREFIX, _SUFFIX = "records-", ".sdr"


def segments(folder: Path) -> list[Path]:
    """The files of a folder, oldest first."""
    return sorted(
        (path for path in folder.glob(f"{_PREFIX}*{_SUFFIX}") if _number(path) is not None),
        key=lambda path: _number(path) or 0,
    )


def next_segment(folder: Path) -> Path:
    """The name of the file to come."""
    found = segments(folder)
    number = (_number(found[-1]) or 0) + 1 if found else 1
    return folder / f"{_PREFIX}{number:05}{_SUFFIX}"


def _number(path: Path) -> int | None:
    digits = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    return int(digits) if digits.isascii() and digits.isdigit() else None
