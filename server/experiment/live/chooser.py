"""How a mode gives arms to requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from server.auth.principal import Principal
from server.experiment.assignment import BUCKETS, Split, digest
from server.experiment.config.assignment import Unit
from server.experiment.live.choice import Choice
from server.experiment.live.unit_key import unit_key
from specdec.types import Request


class Chooser(Protocol):
    """One per running experiment."""

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        """The request's arm; None: it takes no part."""


class KeyChooser:
    """Modes `hash` and `aa`: every key has one arm, always."""

    def __init__(self, salt: str, unit: Unit, weights: Mapping[str, float], share: float) -> None:
        self._salt, self._unit, self._split = salt, unit, Split(weights, share)

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        """By the key's bucket; None also for a request without a key."""
        key = unit_key(self._unit, principal, request)
        if key is None:
            return None
        found = digest(self._salt, key)
        arm = self._split.arm(int.from_bytes(found) % BUCKETS)
        if arm is None:
            return None
        return Choice(arm, "" if self._unit == "request" else found.hex())


class ShadowChooser:
    """Mode `shadow`: everybody gets the control; those whose keys fall into the share are sent to both arms."""

    def __init__(self, salt: str, unit: Unit, control: str, share: float) -> None:
        self._keys = KeyChooser(salt, unit, {control: 1.0}, share)

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        """The control; None outside of the share."""
        choice = self._keys.choose(principal, request)
        return None if choice is None else choice._replace(shadowed=True)
