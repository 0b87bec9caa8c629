"""Sees to it that of all peers only one runs at a time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType

import psutil

from bench.peers.arm import Arm
from bench.peers.peer import Peer
from bench.peers.peer_error import PeerError

FreeBytes = Callable[[], int]


def available_bytes() -> int:
    """Memory that can be had without pushing anybody else out."""
    return int(psutil.virtual_memory().available)


class Stage:
    """Use as ``async with``; when that ends, so have all peers.

    keep: all that were started stay in memory, stopped in their tracks while another is on; else each is ended before
    the next is started.
    """

    def __init__(self, *, keep: bool, free_bytes: FreeBytes = available_bytes) -> None:
        self._keep, self._free_bytes = keep, free_bytes
        self._started: list[Peer] = []
        self._current: Peer | None = None
        self.lost: dict[Arm, str] = {}

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        started, self._started, self._current = self._started, [], None
        await _end_all(started)

    async def enter(self, peer: Peer) -> bool:
        """Bring ``peer`` on, and everybody else off; whether it had to be started for that.

        Raises:
            PeerError: it can not be started or continued; it is lost then.
        """
        if peer is self._current:
            return False
        await self._leave()
        if self._why_lost(peer):
            raise PeerError(self._why_lost(peer))
        try:
            fresh = peer not in self._started
            if fresh:
                await self._start(peer)
            else:
                peer.resume()
        except PeerError as error:
            await self.lose(peer, str(error))
            raise
        self._current = peer
        return fresh

    async def lose(self, peer: Peer, why: str) -> None:
        """``peer`` is not to be asked again: end it, and remember ``why``."""
        self.lost |= dict.fromkeys(peer.arms, why)
        if peer is self._current:
            self._current = None
        if peer in self._started:
            self._started.remove(peer)
        await peer.end()

    async def _start(self, peer: Peer) -> None:
        free = self._free_bytes()
        if peer.needs_bytes > free:
            way_out = "; --alive one keeps one engine at a time in memory" if self._keep and self._started else ""
            raise PeerError(f"needs some {peer.needs_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free{way_out}")
        self._started.append(peer)
        await peer.start()

    async def _leave(self) -> None:
        peer, self._current = self._current, None
        if peer is None:
            return
        if not self._keep:
            self._started.remove(peer)
            await peer.end()
            return
        try:
            peer.pause()
        except PeerError as error:  # it has ended by itself: its next turn is not going to come
            await self.lose(peer, str(error))

    def _why_lost(self, peer: Peer) -> str:
        return next((self.lost[arm] for arm in peer.arms if arm in self.lost), "")


async def _end_all(peers: Seq[Peer]) -> None:
    """All of them, also when we are told to stop meanwhile or one can not be ended."""
    if not peers:
        return
    try:
        await peers[0].end()
    finally:
        await _end_all(peers[1:])
