"""The server to measure: ``python -m bench.server_process --config JSON``, which `LocalServer` starts."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

import uvloop

from server.engine_process import DEFAULT_FACTORY
from server.interfaces import TokenizerLike
from server.observe.logs import configure_logs
from server.served_model import LoadTokenizer
from server.serving import Addresses, Serving
from specdec.config import Config
from specdec.core.types import EngineInfo
from specdec.errors import SpecdecError
from specdec.models.resolve import load_tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; prints one line of JSON with the ports when ready. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.server_process")
    parser.add_argument("--config", required=True, help="Config as JSON")
    parser.add_argument("--factory", default=DEFAULT_FACTORY, help="module:function that builds the engine")
    parser.add_argument("--tokenizer", help="module:function that builds the tokenizer; default: the target's")
    args = parser.parse_args(argv)
    config = Config.model_validate_json(args.config)
    end_with_parent()
    configure_logs(config.server.log_format, logging.INFO)  # as `specdec serve` does: logging is part of the cost

    def on_ready(addresses: Addresses, info: EngineInfo) -> None:
        print(json.dumps({"grpc_port": addresses.grpc_port, "http_port": addresses.http_port}), flush=True)

    async def serve() -> None:
        await Serving(config, _tokenizer(args.tokenizer), factory=args.factory).run(on_ready)

    try:
        uvloop.run(serve())
    except SpecdecError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def end_with_parent() -> None:
    """Stop this process when its parent exits, which closes the pipe on standard input."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _tokenizer(place: str | None) -> LoadTokenizer:
    if place is None:
        return lambda engine: load_tokenizer(engine.target, engine.cache_dir)
    module, _, function = place.partition(":")
    found: Callable[[], TokenizerLike] = getattr(importlib.import_module(module), function)
    return lambda _: found()


if __name__ == "__main__":
    sys.exit(main())
