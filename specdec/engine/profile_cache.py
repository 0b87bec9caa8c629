"""The profile cache: measured costs and learned estimates, as small files for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draft.protocol import Drafter, ModelBasedDrafter
from specdec.atomic_file import replacing
from specdec.control.estimates.learned import Learned

logger = logging.getLogger(__name__)

_VERSION = 2  # of the files; raise it when their content or its meaning changes


class ProfileCache:
    """JSON values of one ``kind``, valid for one ``key``: weights, types, a machine.

    A damaged or outdated file is ignored, and values that cannot be written are not kept; both are logged. What is read
    was written by this version, as the digest shows.
    """

    def __init__(self, cache_dir: Path, kind: str, key: Sequence[object]) -> None:
        self._key = _digest([str(part) for part in key])
        self.path = cache_dir / "controller" / f"{kind}-{self._key[:16]}.json"

    def read(self) -> dict[str, Any]:
        """The values; empty if there is no valid file."""
        try:
            found = json.loads(self.path.read_bytes())
            values: dict[str, Any] = found["values"]
            if (found["version"], found["key"], found["digest"]) != (_VERSION, self._key, _digest(values)):
                raise ValueError("damaged, or made by another version or for other weights")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("%s: ignored, starting without it (%r)", self.path, error)
            return {}
        return values

    def write(self, values: Mapping[str, Any]) -> None:
        """Replace the values, atomically."""
        stored = {"version": _VERSION, "key": self._key, "digest": _digest(values), "values": values}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path, 0o666) as file:  # users may share the cache folder
                file.write(json.dumps(stored).encode())
        except OSError as error:
            logger.warning("%s: cannot be written (%s)", self.path, error)


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


_MAX_DRAFTS = 8  # drafters of one target that are kept


class LearnedProfile:
    """The controller's estimates of the drafters of one target, by the digest of their weights.

    target: digest of the target's weights.
    """

    def __init__(self, cache_dir: Path, target: str) -> None:
        self._file = ProfileCache(cache_dir, "learned", [target])

    def read(self, drafters: Sequence[Drafter]) -> dict[str, Learned]:
        """Estimates of ``drafters`` by name, as far as there are any; they count as a few observations."""
        values = self._file.read()
        keys = {drafter.name: _key(drafter) for drafter in drafters}
        return {name: Learned.from_dict(values[key]).bounded() for name, key in keys.items() if key in values}

    def write(self, drafters: Sequence[Drafter], learned: Mapping[str, Learned]) -> None:
        """Update the estimates of ``drafters``; those of others stay."""
        new = {
            key: learned[drafter.name].bounded().as_dict()
            for drafter in drafters
            if drafter.name in learned and (key := _key(drafter))
        }
        if new:
            others = [(key, value) for key, value in self._file.read().items() if key not in new]
            self._file.write(dict([*others[-_MAX_DRAFTS:], *new.items()]))


def _key(drafter: Drafter) -> str:
    """The key of a drafter's estimates; empty: its weights are unknown."""
    if not isinstance(drafter, ModelBasedDrafter):
        return drafter.name
    return f"{drafter.name} {drafter.digest}" if drafter.digest else ""
