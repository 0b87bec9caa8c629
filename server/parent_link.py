"""The engine process's end of the socket."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

from server.frames import Frame, FrameReader, pack_frame

_CHUNK_BYTES = 1 << 18
_PROGRESS_EVERY_S = 0.1


class ParentGoneError(Exception):
    """The front end closed the socket or died: there is nobody left to serve."""


class ParentLink:
    """Sends frames to the front end and takes its commands. Sending blocks, which is the back-pressure."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._label = ""
        self._shown_at = 0.0

    def send(self, *parts: Any) -> None:
        """Send one frame.

        Raises:
            ParentGoneError: nobody reads.
        """
        try:
            self._sock.sendall(pack_frame(*parts))
        except OSError as error:
            raise ParentGoneError from error

    def receive(self, timeout_s: float) -> list[list[Any]]:
        """Every frame that has arrived, after waiting up to ``timeout_s`` seconds for the first.

        Raises:
            ParentGoneError: the socket is closed.
        """
        frames: list[list[Any]] = []
        while select.select([self._sock], [], [], 0.0 if frames else timeout_s)[0]:
            try:
                data = self._sock.recv(_CHUNK_BYTES)
            except OSError as error:
                raise ParentGoneError from error
            if not data:
                raise ParentGoneError
            frames += self._reader.feed(data)
            if frames and len(data) < _CHUNK_BYTES:
                break  # there was no more
        return frames

    def progress(self, label: str, done: int, total: int) -> None:
        """A `Progress` listener that tells the front end, at most ten times a second per label."""
        now = time.monotonic()
        if label == self._label and done < total and now - self._shown_at < _PROGRESS_EVERY_S:
            return
        self._label, self._shown_at = label, now
        self.send(Frame.PROGRESS, label, done, total)
