"""What there is to compare: the arms that can be run, and why the others can not."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.peers.arm import Arm
from bench.peers.peer import Peer


@dataclass(slots=True)
class Offer:
    """``arms``: all of them, in the order of the tables; those without a peer are in ``missing``, with the reason."""

    arms: list[Arm] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def have(self, peer: Peer) -> None:
        """A process that can be started, for all its arms."""
        self.arms += peer.arms
        self.peers.append(peer)

    def lack(self, arm: Arm, why: str) -> None:
        """An arm that can not be run."""
        self.arms.append(arm)
        self.missing[arm.name] = why

    def join(self, other: Offer) -> None:
        """All that ``other`` has, behind what is here."""
        self.arms += other.arms
        self.peers += other.peers
        self.missing |= other.missing
