"""A rank other than the first, as a process: ``python -m specdec.models.tensor_parallel.rank_process``, started by
`RankProcesses`. It lives no longer than who started it: its socket ends with that process, however it ends."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
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

MESSAGE_BYTES = 65536
KV_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.int8)}


class ParentLink:
    """Messages from the first rank, as JSON, each perhaps with a file descriptor. The process ends when they do."""

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
                os._exit(0)  # at once, in whatever the main thread is: nobody is there to compute for
            self._messages.put((json.loads(data), descriptors))

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next message."""
        return self._messages.get()

    def send(self, **message: Any) -> None:
        """Tell the first rank."""
        self._link.send(json.dumps(message).encode()[:MESSAGE_BYTES])


def main(argv: Sequence[str] | None = None) -> int:
    """Load a share of the weights, then compute until the first rank is gone."""
    parser = argparse.ArgumentParser(prog="specdec.models.tensor_parallel.rank_process")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket to the first rank")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cpus", default="", help="processors to stay on, separated by commas")
    parser.add_argument("--weights", type=Path, required=True, help="packed file")
    parser.add_argument("--descriptor", type=int, help="inherited, of that file, where it has no name")
    parser.add_argument("--key", required=True, help="that it was made for")
    parser.add_argument("--cache-dir", type=Path, required=True)
    args = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the first rank decides
        signal.signal(number, signal.SIG_IGN)
    if args.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in args.cpus.split(",")})  # before memory is taken: it is near then
    torch.set_num_threads(1)
    link = ParentLink(socket.socket(fileno=args.fd))
    try:
        decoder, ranks, words = _load(args, link)
    except Exception as error:
        link.send(error=f"{type(error).__name__}: {error}", damaged=isinstance(error, PackedFileError))
        return 1
    link.send(ready=True)
    try:
        _serve(decoder, ranks, words)
    except RankLostError:
        return 0
    return 0


def _load(args: argparse.Namespace, link: ParentLink) -> tuple[ShardDecoder, SharedRanks, Any]:
    library = load_library(args.cache_dir)
    file = PackedFile(args.weights, args.key)
    share = share_out(file.config, args.size)[args.rank]
    weights = file.read_parts(*share_layout(file.layout, share), lambda done: None).weights(file.config)
    if args.descriptor is not None:
        os.close(args.descriptor)  # or its memory would stay
    message, (segment,) = link.receive()
    sizes = StepSizes(**message["sizes"])
    shapes = shared_shapes(file.config, sizes)
    ranks = SharedRanks(library, segment, shapes, args.rank, args.size, message["spin_us"])
    os.close(segment)
    pool = share_pool(share, sizes, KV_DTYPES[message["kv_dtype"]])
    decoder = ShardDecoder(share, weights, NativeBackend(args.cache_dir, args.threads), pool, ranks, sizes)
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
