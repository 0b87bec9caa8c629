"""Rejects calls that a browser sends on behalf of a foreign web site.

A site can make a browser call an address of this machine. Two cases need an answer on a server without keys: a call
that browsers send across origins without a preflight, and a host name of the site that resolves to this machine (DNS
rebinding), so that the browser treats the call as same-origin.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from server.errors import CrossSiteError, HostNotAllowedError
from specdec.config import ServerConfig

# Suffixes that cannot be registered: no public site can use them.
_LOCAL_SUFFIXES = (".localhost", ".localdomain", ".local", ".internal", ".lan", ".home.arpa")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class BrowserRules:
    """Decides which calls are rejected. Programs are unaffected: they send no ``Origin``, and the configured host."""

    def __init__(self, config: ServerConfig) -> None:
        self._hosts = frozenset(config.allowed_hosts)
        # A foreign site has no key. The names of a server that other machines reach are unknown here.
        self._any_host = "*" in self._hosts or not (self._hosts or (config.on_loopback and config.keys_file is None))
        self._bound = config.host.lower()
        self._origins = frozenset(config.cors_origins)

    def check(self, method: str, header: Callable[[str], str]) -> None:
        """``header`` returns a header by its lower-case name, empty if absent.

        Raises:
            HostNotAllowedError: the ``Host`` header is not a name of this server.
            CrossSiteError: another origin sent the call without a preflight.
        """
        host = header("host")
        if host and not self._any_host and not self._is_ours(_name(host)):
            raise HostNotAllowedError(host)
        if method in _READING or _is_json(header("content-type")):
            return  # harmless for a foreign site, or browsers send a preflight, which CORS answers
        origin, site = header("origin"), header("sec-fetch-site")
        if "*" in self._origins or origin in self._origins:
            return
        foreign = origin != "" and origin.partition("://")[2].lower() != host.lower()
        if foreign or site in ("cross-site", "same-site"):
            raise CrossSiteError(origin)

    def _is_ours(self, name: str) -> bool:
        if (
            name in self._hosts
            or name == self._bound
            or any(name.endswith(host[1:]) for host in self._hosts if host.startswith("*."))
        ):
            return True
        if _is_address(name):
            return True  # rebinding needs a name
        return "." not in name or name.endswith(_LOCAL_SUFFIXES)


def _name(host: str) -> str:
    """The host of a ``Host`` header, in lower case, without port and brackets."""
    host = host.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
