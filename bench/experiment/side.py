"""Where an arm's server is."""

from __future__ import annotations

from typing import NamedTuple

from specdec.client import Credentials


class Side(NamedTuple):
    """``source``: what gave the URL, for errors. ``shown``: how reports call the server. model "": the first that the
    server names."""

    url: str
    source: str
    shown: str
    credentials: Credentials = Credentials()
    model: str = ""
