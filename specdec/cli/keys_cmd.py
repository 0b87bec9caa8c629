"""`specdec keys`: the file of keys of a server."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.group("keys")
def keys_group() -> None:
    """Make keys for `specdec serve --keys-file`."""


@keys_group.command("new")
@click.option(
    "--file", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File of keys; made if need be."
)
@click.option("--name", required=True, help="Who holds the key: shown in logs, unique in the file.")
@click.option("--tenant", required=True, help="Whose data it may see: keys of one tenant share caches, others do not.")
@click.option(
    "--admin", is_flag=True, help="May drain the server, flush its cache, change its draft model and run experiments."
)
@click.option("--requests-per-minute", type=float, help="Requests begun per minute.")
@click.option("--tokens-per-minute", type=float, help="Tokens of prompts and outputs per minute.")
@click.option("--max-concurrent", type=int, help="Requests that run at once.")
@click.option("--max-priority", type=int, help="Highest priority; what asks for more runs at this one.")
@click.option("--own-key", is_flag=True, help="Take a key of your choice from standard input, and hash it slowly.")
def new_command(
    file: Path,
    name: str,
    tenant: str,
    admin: bool,
    requests_per_minute: float | None,
    tokens_per_minute: float | None,
    max_concurrent: int | None,
    max_priority: int | None,
    own_key: bool,
) -> None:
    """Make a key and print it, this once; the file gets its hash. A running server takes it at once."""
    from pydantic import ValidationError

    from server.auth.key_entry import KeyEntry
    from server.auth.key_file import add_key
    from server.auth.key_hash import KeyHash, new_key

    key = _own_key() if own_key else new_key()
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "max_priority": max_priority,
    }
    digest = str(KeyHash.of(key, slow=own_key))
    entry = {"name": name, "tenant": tenant, "hash": digest, "admin": admin, "limits": limits}
    try:
        checked = KeyEntry.model_validate(entry)
    except ValidationError as error:
        problems = [f"--{str(e['loc'][-1]).replace('_', '-')}: {e['msg']}" for e in error.errors()]
        raise click.UsageError("; ".join(problems)) from None
    add_key(file, checked)
    click.echo(f"added {name} of {tenant} to {file}", err=True)
    if not own_key:
        click.echo("this is the key; it is not kept anywhere, so keep it now:", err=True)
        click.echo(key)


def _own_key() -> str:
    key = sys.stdin.readline().strip()
    if len(key) < 12 or not key.isascii() or not key.isprintable() or len(key.split()) != 1:
        raise click.UsageError("--own-key: give one line of at least 12 printable ASCII characters without spaces")
    return key
