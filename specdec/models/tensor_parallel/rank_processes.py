"""Starts, watches and ends the processes of all ranks but the first."""

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
from specdec.models.tensor_parallel import rank_process
from specdec.models.tensor_parallel.rank_process import MESSAGE_BYTES

_LOG = logging.getLogger(__name__)
_REAP_S = 5.0  # seconds that a process has to end once its socket is closed


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    link: socket.socket


class RankProcesses:
    """Starts ranks 1 to ``size`` - 1, each of which loads its share of ``model``'s weights at once.

    processors: of every rank, including the first; None: wherever the system puts them.
    """

    def __init__(
        self, model: PackedModel, size: int, threads: int, cache_dir: Path, processors: Sequence[set[int]] | None
    ) -> None:
        self.lost = ""  # which rank ended, and how; empty while all run
        self._model, self._closing = model, False
        self._ranks: list[_Rank] = []
        common = {
            "size": size, "threads": threads, "weights": str(model.path), "descriptor": model.descriptor,
            "key": model.key, "cache_dir": str(cache_dir.expanduser()),
        }  # fmt: skip
        try:
            for rank in range(1, size):
                own = None if processors is None else sorted(processors[rank])
                self._ranks.append(_spawn(common | {"rank": rank, "processors": own}))
        except BaseException:
            self.close()
            raise

    def begin(self, setup: dict[str, Any], segment: int, on_lost: Callable[[], None]) -> None:
        """Build every rank's decoder by ``setup`` over the memory ``segment``, and watch the ranks from then on.

        Raises:
            ModelError: a rank could not build its decoder; all ranks are ended.
        """
        try:
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it ended; its last message says why
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

    def close(self) -> None:
        """Kill all ranks and wait for their ends; they hold no state that outlives them."""
        self._closing = True
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.link.close()


def _spawn(setup: dict[str, Any]) -> _Rank:
    """Start a rank by ``setup``, a `RankSetup` without the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = [fd for fd in (theirs.fileno(), setup["descriptor"]) if fd is not None]
    command = [*module_command(rank_process.__name__), json.dumps(setup | {"fd": theirs.fileno()})]
    try:
        with theirs:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited, env=module_environment())
    except BaseException:
        ours.close()
        raise
    return _Rank(setup["rank"], process, ours)


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        return "it closed its socket"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
