"""Options of the commands that call a server: the key, and how the server is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specdec.client import Credentials

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--key-file", {"type": _FILE}, "File that holds the key for --server, as `specdec keys new` printed it."),
    ("--tls", {"is_flag": True}, "The server at --server speaks TLS."),
    ("--ca", {"type": _FILE}, "PEM authorities that the server's certificate must be of; default: the usual ones."),
    ("--cert", {"type": _FILE}, "PEM certificate to show to a server that asks for one."),
    ("--cert-key", {"type": _FILE}, "PEM private key of --cert."),
)


def credential_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to ``command``, which gives its keyword arguments to `pop_credentials`."""
    for flag, settings, text in reversed(_OPTIONS):
        command = click.option(flag, help=text, **settings)(command)
    return command


def pop_credentials(values: dict[str, Any]) -> Credentials:
    """Take what the options put into ``values`` out of it.

    Raises:
        click.UsageError: an option means nothing without another.
    """
    from specdec.client import Credentials

    key_file, tls, ca, cert, cert_key = (
        values.pop(flag.lstrip("-").replace("-", "_")) for flag, _, _ in _OPTIONS
    )  # fmt: skip
    if not tls and (ca or cert or cert_key):
        raise click.UsageError("--ca, --cert and --cert-key mean nothing without --tls")
    if (cert is None) != (cert_key is None):
        raise click.UsageError("--cert and --cert-key belong together: give both, or neither")
    return Credentials(read_key("--key-file", key_file), tls, ca, cert, cert_key)


def read_key(option: str, file: Path | None) -> str:
    """The key in a file that ``option`` named; empty where none did.

    Raises:
        click.UsageError: it can not be read, or holds something else.
    """
    if file is None:
        return ""
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{option}: {file} can not be read ({error})") from None
    if not key or len(key.split()) != 1:
        raise click.UsageError(f"{option}: {file} must hold one key and nothing else")
    return key
