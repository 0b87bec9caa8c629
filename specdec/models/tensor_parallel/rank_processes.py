"""The processes of all ranks but the first, as the first sees them: started, watched, ended."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.child_python import module_command, module_environment
from specdec.errors import ModelError
from specdec.models.load import PackedModel
from specdec.models.tensor_parallel.rank_process import MESSAGE_BYTES

_LOG = logging.getLogger(__name__)
_REAP_S = 5.0


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    link: socket.socket


class RankProcesses:
    """Starts ranks 1 to ``size`` - 1, each of which loads its share of ``model``'s weights at once.

    processors: of every rank, the first too; None: wherever the system puts them. ``lost``: which rank ended and how;
    empty while all are there.
    """

    def __init__(
        self, model: PackedModel, size: int, threads: int, cache_dir: Path, processors: Sequence[set[int]] | None
    ) -> None:
        self.lost = ""
        self._model, self._closing = model, False
        self._ranks: list[_Rank] = []
        try:
            for rank in range(1, size):
                cpus = "" if processors is None else ",".join(map(str, sorted(processors[rank])))
                words: tuple[str, ...] = (
                    "--rank", str(rank), "--size", str(size), "--threads", str(threads), "--cpus", cpus,
                    "--weights", str(model.path), "--key", model.key, "--cache-dir", str(cache_dir.expanduser()),
                )  # fmt: skip
                if model.descriptor is not None:
                    words += ("--descriptor", str(model.descriptor))
                self._ranks.append(_spawn(rank, words, model.descriptor))
        except BaseException:
            self.close()
            raise

    def begin(self, setup: dict[str, Any], segment: int, on_lost: Callable[[], None]) -> None:
        """Have all build their decoders by ``setup`` over the memory ``segment``, wait until they have, and watch them
        from then on.

        Raises:
            ModelError: a rank could not; all are ended.
        """
        try:
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it is gone; what it said last tells why
                    socket.send_fds(rank.link, [json.dumps(setup).encode()], [segment])
            for rank in self._ranks:
                self._await_ready(rank)
        except BaseException:
            self.close()
            raise
        for rank in self._ranks:
            threading.Thread(target=self._watch, args=(rank, on_lost), name=f"rank-{rank.number}", daemon=True).start()

    def _await_ready(self, rank: _Rank) -> None:
        try:
            data = rank.link.recv(MESSAGE_BYTES)
        except OSError:
            data = b""
        message = json.loads(data) if data else {"error": _ending(rank.process)}
        if message.get("damaged"):
            raise self._model.damaged(message["error"])
        if "error" in message:
            raise ModelError(f"engine.tp: rank {rank.number} could not start: {message['error']}")

    def _watch(self, rank: _Rank, on_lost: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            while rank.link.recv(MESSAGE_BYTES):
                pass
        if not self._closing:
            self.lost = f"rank {rank.number}, process {rank.process.pid}: {_ending(rank.process)}"
            _LOG.error("a rank of the target was lost: %s", self.lost)
            on_lost()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank from 1 on."""
        return [rank.process.pid for rank in self._ranks]

    def close(self) -> None:
        """End all and wait for them; they hold nothing that is worth a farewell."""
        self._closing = True
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.link.close()


def _spawn(rank: int, words: Sequence[str], weights: int | None) -> _Rank:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = [theirs.fileno()] if weights is None else [theirs.fileno(), weights]
    try:
        with theirs:
            process = subprocess.Popen(
                [*module_command("specdec.models.tensor_parallel.rank_process"), "--fd", str(theirs.fileno()), *words],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                env=module_environment(),
            )
    except BaseException:
        ours.close()
        raise
    return _Rank(rank, process, ours)


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        return "it closed its socket"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
