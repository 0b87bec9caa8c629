"""A server of our own in a process of its own, whose time and memory can be told from ours; it ends when we do."""

from __future__ import annotations

import psutil

from bench.child_server import ChildServer
from specdec.config import Config


class LocalServer(ChildServer):
    """Use as ``async with``: it is ready inside. Ports of 0 in ``config`` are of the system's choice.

    factory, tokenizer: ``module:function``, instead of the real engine's and the target's.
    """

    def __init__(self, config: Config, *, factory: str | None = None, tokenizer: str | None = None) -> None:
        words = ["--config", config.model_dump_json()]
        words += ["--factory", factory] if factory else []
        words += ["--tokenizer", tokenizer] if tokenizer else []
        super().__init__("bench.server_process", *words)

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        return next(child for child in self.frontend.children() if "server.engine_process" in child.cmdline())

    def memory_bytes(self) -> dict[str, int]:
        """Resident bytes that belong to each process alone."""
        parts = {"frontend": self.frontend, "engine": self.engine}
        return {name: int(process.memory_full_info().uss) for name, process in parts.items()}
