"""Where a visitor goes, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import httpx

from specdec.client import Client

TEXTS = 64  # beginnings of prompts: few enough that they come again and are found in the cache
LONGEST = 1500


@dataclass(slots=True)
class Place:
    """``number``: the visitor's. ``text``: what prompts are cut from."""

    number: int
    client: Client
    http: httpx.AsyncClient
    grpc_port: int
    http_port: int
    text: str
    random: Random

    def cut(self, longest: int = LONGEST) -> str:
        """A prompt: one of `TEXTS` beginnings, of some length."""
        begin = self.random.randrange(TEXTS) * (len(self.text) // (2 * TEXTS))
        return self.text[begin : begin + self.random.randrange(20, longest)]
