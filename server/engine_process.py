"""The engine's own process: ``python -m server.engine_process --fd N --config JSON``, started by `EngineChild`.

Exit codes: 0 asked to close, or the front end is gone; 1 the engine broke; 2 it refused to start.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from server.engine_loop import EngineLoop
from server.engine_protocol import EngineLike, ProgressListener
from server.frames import Frame
from server.parent_link import ParentGoneError, ParentLink
from server.wire import pack_info
from specdec.config import EngineConfig
from specdec.errors import SpecdecError

_LOG = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
DEFAULT_FACTORY = "specdec.engine.build:build_engine"
EngineFactory = Callable[[EngineConfig, ProgressListener], EngineLike]


def main(argv: Sequence[str] | None = None) -> int:
    """Build the engine, serve until told to close, and return the exit code."""
    parser = argparse.ArgumentParser(prog="server.engine_process")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the Unix socket")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--factory", default=DEFAULT_FACTORY, help="module:function that builds the engine")
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds between signs of life")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    _leave_signals_to_the_parent()
    link = ParentLink(socket.socket(fileno=args.fd))
    try:
        engine = _find(args.factory)(EngineConfig.model_validate_json(args.config), link.progress)
        link.send(Frame.READY, pack_info(engine.info()))
        try:
            EngineLoop(engine, link, args.heartbeat).run()
        finally:
            engine.close()
    except ParentGoneError:
        return 0
    except Exception as error:
        return _last_words(link, error)
    return 0


def _find(factory: str) -> EngineFactory:
    module, _, function = factory.partition(":")
    found: EngineFactory = getattr(importlib.import_module(module), function)
    return found


def _last_words(link: ParentLink, error: Exception) -> int:
    """Tell why the process ends; the log gets it too, for when nobody listens any more."""
    refusal = isinstance(error, SpecdecError)
    message = str(error) if refusal else f"{type(error).__name__}: {error}"
    if not refusal:
        _LOG.critical("the engine broke", exc_info=error)
    try:
        link.send(Frame.DIED, refusal, message)
    except ParentGoneError:
        _LOG.warning("the front end is gone already")
    return 2 if refusal else 1


def _leave_signals_to_the_parent() -> None:
    """Ctrl-C and a supervisor's TERM reach the whole group; the front end drains first and then says close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # A closed socket is noticed between steps only; this also ends a process that is busy loading.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
