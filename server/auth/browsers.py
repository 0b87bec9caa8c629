"""What a browser sends in the name of somebody else's page, told apart from what programs and our own page send.

A page of any site can make a browser send a call to an address of this machine. Two ways need an answer here, for a
server that wants no key: a call that browsers send across sites without asking first, and a host name of the page's
own that suddenly means this machine (DNS rebinding), so that the browser takes the call for one within that site.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from server.errors import CrossSiteError, HostNotAllowedError
from specdec.config import ServerConfig

# Names that nobody can register: no page of the internet can be at one.
_LOCAL_SUFFIXES = (".localhost", ".localdomain", ".local", ".internal", ".lan", ".home.arpa")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class BrowserRules:
    """Which calls are refused though their sender may connect. Programs never notice: they send no ``Origin``, and the
    host that they were told."""

    def __init__(self, config: ServerConfig) -> None:
        self._hosts = frozenset(config.allowed_hosts)
        # A page has no key; and by which names others reach a server that is not only this machine's is not known here.
        self._any_host = "*" in self._hosts or not (self._hosts or (config.on_loopback and config.keys_file is None))
        self._bound = config.host.lower()
        self._origins = frozenset(config.cors_origins)

    def check(self, method: str, header: Callable[[str], str]) -> None:
        """``header`` gives a header of the call by its name in lower case, empty where there is none.

        Raises:
            HostNotAllowedError: the call came by a name that is none of this server's.
            CrossSiteError: a page of another origin sent it without asking first.
        """
        host = header("host")
        if host and not self._any_host and not self._is_ours(_name(host)):
            raise HostNotAllowedError(host)
        if method in _READING or _is_json(header("content-type")):
            return  # has no effect that a page could read; or browsers ask first, which CORS answers
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
            return True  # a name is what rebinding needs
        return "." not in name or name.endswith(_LOCAL_SUFFIXES)


def _name(host: str) -> str:
    """The host of a ``Host`` header, in lower case, without its port and brackets."""
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
