"""Small files in the cache folder: what was measured or learned, kept for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from draft.protocol import Drafter, ModelBasedDrafter
from specdec.control.estimates.learned import Learned

logger = logging.getLogger(__name__)

_VERSION = 1  # raise when what is kept, or what its numbers mean, changes
_LARGEST = 4 << 20  # bytes of a file that is read
_FILES = 64  # of one kind that are kept; the oldest go


class ProfileCache:
    """JSON values of one ``kind`` that hold for what ``key`` names: weights and the types they are held in, a machine.

    A file that is damaged, old or made for something else is as good as none; what can not be written is not kept.
    Either is logged in one line; that writing fails again, as on a full disk, is not said again.
    """

    def __init__(self, cache_dir: Path, kind: str, key: Sequence[object]) -> None:
        self._kind, self._key = kind, hashlib.sha256(json.dumps([str(part) for part in key]).encode()).hexdigest()
        self.path = cache_dir.expanduser() / "controller" / f"{kind}-{self._key[:16]}.json"
        self._failing = False

    def read(self) -> dict[str, Any]:
        """What was kept; nothing if that is nothing or can not be read."""
        try:
            with self.path.open("rb") as file:
                values = json.loads(file.read(_LARGEST))
            if values["version"] != _VERSION or values["key"] != self._key:
                raise ValueError("made by another version, or for other weights")
            found: dict[str, Any] = dict(values["values"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.refuse(error)
            return {}
        return found

    def refuse(self, error: Exception) -> None:
        """Say that what was read is of no use."""
        logger.warning("%s: ignored, starting without it (%r)", self.path, error)

    def write(self, values: Mapping[str, Any]) -> None:
        """Keep ``values`` in place of what there was; nobody ever sees a part of them."""
        text = json.dumps({"version": _VERSION, "key": self._key, "values": values}, separators=(",", ":"))
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(text, encoding="ascii")
                os.replace(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)
            self._tidy()
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning("%s: can not be kept (%s)", self.path, error)
            self._failing = True

    def _tidy(self) -> None:
        files = list(self.path.parent.glob(f"{self._kind}-*.json"))
        if len(files) > _FILES:
            with suppress(FileNotFoundError):  # another process tidies too
                for stale in sorted(files, key=lambda file: file.stat().st_mtime)[:-_FILES]:
                    stale.unlink()


_DRAFTS = 8  # of one target whose records are kept


class LearnedProfile:
    """What the controller learned of the drafters of one target, kept by the digest of the weights that they run.

    target: digest of the target's weights.
    """

    def __init__(self, cache_dir: Path, target: str) -> None:
        self._file = ProfileCache(cache_dir, "learned", [target])

    def read(self, drafters: Sequence[Drafter]) -> dict[str, Learned]:
        """By name, what is known of those of ``drafters`` that are known, at the weight of a few observations."""
        values = self._file.read()
        try:
            return {
                drafter.name: Learned.from_dict(values[key]).bounded()
                for drafter in drafters
                if (key := _key(drafter)) in values
            }
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            self._file.refuse(error)
            return {}

    def write(self, drafters: Sequence[Drafter], learned: Mapping[str, Learned]) -> None:
        """Keep what is known of ``drafters`` now, and what there was of others."""
        new = {
            key: learned[drafter.name].bounded().as_dict()
            for drafter in drafters
            if drafter.name in learned and (key := _key(drafter))
        }
        if new:
            others = [(key, value) for key, value in self._file.read().items() if key not in new]
            self._file.write(dict([*others[-_DRAFTS:], *new.items()]))


def _key(drafter: Drafter) -> str:
    """What a drafter's records are found by; nothing where it is not known what it runs."""
    if not isinstance(drafter, ModelBasedDrafter):
        return drafter.name
    return f"{drafter.name} {drafter.digest}" if drafter.digest else ""
