"""A rank other than the first, as a process that `RankProcesses` starts.

It ends with the process that started it, however that ends: their socket is closed then.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.models.pack import PackedFile, PackedFileError
from specdec.models.tensor_parallel.shard_decoder import (
    ShardDecoder,
    StepSizes,
    read_command,
    share_pool,
    shared_shapes,
)
from specdec.models.tensor_parallel.shares import share_layout, share_out
from verify_kernels.cpu.library import load_library
from verify_kernels.cpu.native_backend import NativeBackend
from verify_kernels.cpu.shared_ranks import RankLostError, SharedRanks

MESSAGE_BYTES = 65536  # the most that a message between ranks takes
KV_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.int8)}


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The one argument of the process's command line, as JSON."""

    fd: int  # inherited end of a socket to the first rank
    rank: int
    size: int  # ranks of the model
    threads: int
    processors: list[int] | None  # to stay on; None: wherever the system puts the process
    weights: str  # path of the packed file
    descriptor: int | None  # inherited, of the packed file where it has no name
    key: str  # that the packed file was made for
    cache_dir: str


class ParentLink:
    """Messages from the first rank: JSON, each with or without a file descriptor. The process ends when they end."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._messages: queue.SimpleQueue[tuple[dict[str, Any], list[int]]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 1)
            except OSError:
                data = b""
            if not data:
                os._exit(0)  # at once, whatever the main thread does: its results have no reader
            self._messages.put((json.loads(data), descriptors))

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next message."""
        return self._messages.get()

    def send(self, **message: Any) -> None:
        """Send a message to the first rank."""
        self._link.send(json.dumps(message).encode()[:MESSAGE_BYTES])


def main(argv: Sequence[str] | None = None) -> int:
    """Load a share of the weights, then compute until the first rank is gone. ``argv``: a `RankSetup` as JSON."""
    (given,) = sys.argv[1:] if argv is None else argv
    setup = RankSetup(**json.loads(given))
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the first rank decides
        signal.signal(number, signal.SIG_IGN)
    if setup.processors is not None:
        os.sched_setaffinity(0, setup.processors)  # before memory is taken, so that it lies near them
    torch.set_num_threads(1)
    link = ParentLink(socket.socket(fileno=setup.fd))
    try:
        decoder, ranks, words = _load(setup, link)
    except Exception as error:
        link.send(error=f"{type(error).__name__}: {error}", damaged=isinstance(error, PackedFileError))
        return 1
    link.send(ready=True)
    with contextlib.suppress(RankLostError):
        _serve(decoder, ranks, words)
    return 0


def _load(setup: RankSetup, link: ParentLink) -> tuple[ShardDecoder, SharedRanks, Any]:
    cache_dir = Path(setup.cache_dir)
    library = load_library(cache_dir)
    file = PackedFile(Path(setup.weights), setup.key)
    share = share_out(file.config, setup.size)[setup.rank]
    weights = file.read_parts(*share_layout(file.layout, share), lambda done: None).weights(file.config)
    if setup.descriptor is not None:
        os.close(setup.descriptor)  # or its memory would stay
    message, (segment,) = link.receive()
    sizes = StepSizes(**message["sizes"])
    shapes = shared_shapes(file.config, sizes)
    ranks = SharedRanks(library, segment, shapes, setup.rank, setup.size, message["spin_us"])
    os.close(segment)
    pool = share_pool(share, sizes, KV_DTYPES[message["kv_dtype"]])
    decoder = ShardDecoder(share, weights, NativeBackend(cache_dir, setup.threads), pool, ranks, sizes)
    return decoder, ranks, ranks.buffer("command").view(torch.int32)[0].numpy()


def _serve(decoder: ShardDecoder, ranks: SharedRanks, words: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    while True:
        ranks.meet()
        command = read_command(words)
        if command.source:
            decoder.move_kv(*command.moves)
        if command.batch is not None:
            decoder.forward(command.batch, command.logit_rows)
        else:
            ranks.meet()


if __name__ == "__main__":
    sys.exit(main())
