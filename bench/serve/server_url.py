"""A server's URL, read."""

from __future__ import annotations

from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from specdec.errors import ConfigError


class ServerUrl(NamedTuple):
    """``place``: host:port where ``face`` is grpc; else the URL that paths are put behind, with the API's version."""

    face: Literal["grpc", "http"]
    place: str
    tls: bool

    @staticmethod
    def read(url: str) -> ServerUrl:
        """From ``grpc://host:port``, ``grpcs://host:port`` (TLS), ``http://host:port`` or ``https://``; of the latter
        two, a URL without a path means the one below ``/v1``.

        Raises:
            ConfigError: it is of none of these forms.
        """
        try:
            parts = urlsplit(url)
            bare = parts.path in ("", "/")
            good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            raise ConfigError(f"url: {url!r} is no URL; write grpc://HOST:PORT or http://HOST:PORT/v1") from None
        if good and bare and parts.scheme in ("grpc", "grpcs"):
            return ServerUrl("grpc", parts.netloc, parts.scheme == "grpcs")
        if good and parts.scheme in ("http", "https"):
            return ServerUrl("http", url.rstrip("/") + ("/v1" if bare else ""), parts.scheme == "https")
        raise ConfigError(f"url: {url!r} is neither grpc://HOST:PORT nor http://HOST:PORT/v1")
