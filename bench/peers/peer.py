"""An engine in a process of its own, whatever it is asked through."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from bench.peers.answer import Answer
from bench.peers.arm import Arm
from bench.peers.peer_prompt import PeerPrompt


class Peer(Protocol):
    """Serves its ``arms``, one prompt at a time. ``needs_bytes``: memory it is going to take, roughly."""

    arms: Seq[Arm]
    needs_bytes: int

    async def start(self) -> None:
        """Returns once it takes prompts; raises PeerError, and then nothing of it is left running."""

    async def ask(self, arm: Arm, prompt: PeerPrompt) -> Answer:
        """Its answer, with ``error`` set where it refuses. Raises PeerError where it is no longer to be counted on."""

    def pause(self) -> None:
        """Stop all its processes where they are: it takes no time from others then. Raises PeerError if it is gone."""

    def resume(self) -> None:
        """Let them go on; raises PeerError if it is gone."""

    async def end(self) -> None:
        """End every process of it, whatever state it is in; may be called at any time, and again."""

    def facts(self) -> dict[str, Any]:
        """What a report says of it: version, command; JSON-able."""
