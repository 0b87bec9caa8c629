"""`specdec serve` and `specdec status`: a server, from loading to drain; `specdec keys`: its file of keys."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import ssl
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import (
    CONNECT_S,
    TEXT,
    Ask,
    ScreenCommand,
    add_server_options,
    asks_server,
    config_options,
    pop_config,
)
from specdec.config import Config, EngineConfig, ServerConfig

if TYPE_CHECKING:
    from server.serving import Addresses
    from specdec.client.client import Client
    from specdec.core.types import EngineInfo, ServerLoad


# Flag, and the field of the configuration that it sets.
_MORE = (
    ("--alias", "engine.aliases"),
    ("--kv-disk-bytes", "engine.kv_disk_bytes"),
    ("--keys-file", "server.keys_file"),
    ("--tls-cert", "server.tls_cert"),
    ("--tls-key", "server.tls_key"),
    ("--tls-client-ca", "server.tls_client_ca"),
    ("--keys-without-tls", "server.keys_without_tls"),
    ("--max-queued-tokens", "server.max_queued_tokens"),
    ("--metrics-compat", "server.metrics_compat"),
    ("--kv-events", "server.kv_events.endpoint"),
    ("--open-metrics", "server.open_metrics"),
    ("--log-format", "server.log_format"),
    ("--log-texts", "server.log_texts"),
    ("--otlp-endpoint", "server.otlp_endpoint"),
    ("--capture", "server.capture_dir"),
    ("--capture-prompts", "server.capture_prompts"),
)
_SCREEN = {
    "Model": ("--config", "--target", "--draft", "--device", "--threads", "--kv-tokens"),
    "Speculation": ("--speculation", "--drafter"),
    "Network": ("--host", "--grpc-port", "--http-port", "--port", "--keys-file", "--quiet"),
}
_OPEN = ServerConfig()
_DISK_BYTES = 4 << 30  # of prefix cache for a server of one user, if nothing else is configured
_DISK_SHARE = 1 / 4  # of the free space, at most


@click.command("serve", cls=ScreenCommand, screen=_SCREEN)
@click.argument("model", type=TEXT, required=False)
@click.option("--model", "named", type=TEXT, metavar="MODEL", help="The same as MODEL and --target.")
@click.option("--port", type=click.IntRange(0, 65535), help="The same as --http-port.")
@add_server_options
@partial(config_options, options=_MORE)
@click.option("--quiet", is_flag=True, help="Log warnings and errors only.")
def serve_command(quiet: bool, **values: Any) -> None:
    """Serve MODEL over gRPC and HTTP until SIGTERM or Ctrl-C, then finish running requests.

    MODEL is a name from `specdec models list`, a .gguf file, a Hugging Face folder or a hub id.
    """
    for flags, (name, *synonyms) in (
        ("MODEL, --model and --target", ("engine__target", "model", "named")),
        ("--port and --http-port", ("server__http_port", "port")),
    ):
        given = [value for each in (name, *synonyms) if (value := values.pop(each)) is not None]
        if len(given) > 1:
            raise click.UsageError(f"{flags} mean the same: give one of them")
        values[name] = given[0] if given else None
    chosen = values["engine__target"] is not None or values["config_file"] is not None
    config = with_disk_cache(pop_config(values))
    import uvloop

    from server.observe.logs import configure_logs
    from server.served_model import Task
    from server.serving import Serving
    from specdec.cli.progress_bar import progress_bars
    from specdec.models.resolve import load_tokenizer

    configure_logs(config.server.log_format, logging.WARNING if quiet else logging.INFO)
    say = _log_lines if config.server.log_format == "json" else click.echo
    for engine in config.engines.values() or (config.engine,):
        hint = "" if chosen else " (the default; `specdec serve MODEL` takes another: see `specdec models list`)"
        say(f"loading {engine.target}{hint} ...", err=True)
    with ExitStack() as bars:
        progress = bars.enter_context(progress_bars())

        async def serve() -> None:
            serving = Serving(config, lambda one: load_tokenizer(one.target, one.cache_dir), progress=progress)

            def on_ready(addresses: Addresses, info: EngineInfo) -> None:
                bars.close()
                infos = {model.name: model.info for model in serving.models}
                knows_chat = any(model.can(Task.CHAT) for model in serving.models)
                lines = ready_lines(addresses, info, knows_chat, config.server, several=len(infos) > 1)
                say("\n".join([*lines, *model_lines(infos)]))

            await serving.run(on_ready)

        uvloop.run(serve())
    say("stopped", err=True)


def _log_lines(text: str, err: bool = False) -> None:
    """Log ``text`` line by line, also with --quiet: `click.echo` where everything printed is to be JSON."""
    logger = logging.getLogger(__name__)
    logger.setLevel(logging.INFO)
    for line in text.splitlines():
        logger.info("%s", line.strip())


def with_disk_cache(config: Config) -> Config:
    """``config`` with a prefix cache on disk for engines that set no ``kv_disk_bytes``; of 0 bytes if there is a
    `keys_file`. Several engines share the space that one would take."""
    n_engines = max(1, len(config.engines))

    def completed(engine: EngineConfig) -> EngineConfig:
        if engine.kv_disk_bytes is not None:
            return engine
        most = _DISK_BYTES
        folder = (engine.kv_disk_folder or engine.cache_dir).absolute()
        with suppress(OSError):  # the free space cannot be measured
            made = next(each for each in (folder, *folder.parents) if each.exists())  # the engine makes the rest
            most = int(min(most, _DISK_SHARE * shutil.disk_usage(made).free))
        return engine.model_copy(update={"kv_disk_bytes": 0 if config.server.keys_file else most // n_engines})

    engines = {name: completed(engine) for name, engine in config.engines.items()}
    return config.model_copy(update={"engine": completed(config.engine), "engines": engines})


def ready_lines(
    addresses: Addresses, info: EngineInfo, knows_chat: bool, server: ServerConfig = _OPEN, *, several: bool = False
) -> list[str]:
    """Return the lines printed when the server is ready, including a client command to paste. several: what each
    model uses stands in `model_lines`."""
    drafters = ", ".join(info.drafters) or "none"
    host = _certified(_reachable(addresses.host), server.tls_cert)
    ask = '--chat "Why is the sky blue?"' if knows_chat else '"Once upon a time"'
    http = addresses.http_port
    scheme = "http" if server.tls_cert is None else "https"
    memory = f"{info.memory_bytes / 2**30:.1f} GiB of memory"
    if info.weight_bytes:
        weights = f"{info.weight_bytes / 2**30:.1f}"
        memory += f", {weights} GiB of weights on the GPU" if info.kernels == "triton" else f", {weights} of it weights"
    uses = f"{memory}; the KV cache holds {info.kv_tokens:,} tokens, up to {info.max_context:,} of a request"
    return [
        f"ready: {info.target}, {info.dtype}, {info.kernels} kernels, {info.numeric_mode}, drafters: {drafters}",
        f"  gRPC  {host}:{addresses.grpc_port}",
        *([f"  HTTP  {scheme}://{host}:{http}/v1 (base URL of OpenAI clients)"] if http is not None else []),
        *([f"  page  {scheme}://{host}:{http}/"] if http is not None and server.page else []),
        *([] if several else [f"  uses  {uses}"]),
        f"  try   {_program()} generate --server {host}:{addresses.grpc_port}{_credential_flags(server)} {ask}",
    ]


def model_lines(infos: Mapping[str, EngineInfo]) -> list[str]:
    """What each of several models is, by name."""
    if len(infos) == 1:
        return []
    return [
        f"  {name}: {info.target}, {info.dtype}, {info.memory_bytes / 2**30:.1f} GiB of memory, {info.threads} threads"
        f", {info.kv_tokens:,} tokens of KV cache"
        for name, info in infos.items()
    ]


def _credential_flags(server: ServerConfig) -> str:
    """Options that a client of ``server`` needs besides the address; the caller's own files are in capitals."""
    flags = ""
    if server.tls_cert is not None:
        flags += " --tls"
        if _self_signed(server.tls_cert):
            flags += f" --ca {shlex.quote(str(server.tls_cert))}"
        if server.tls_client_ca is not None:
            flags += " --cert CERT --cert-key CERT_KEY"
    return flags + (" --key-file KEY" if server.keys_file is not None else "")


def _self_signed(cert: Path) -> dict[str, Any]:
    """The certificate at ``cert`` if clients must trust it itself, because no authority signed it; else empty."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(OSError, ValueError):
        context.load_verify_locations(cert)
    return next((each for each in context.get_ca_certs() if each.get("subject") == each.get("issuer")), {})


def _certified(host: str, cert: Path | None) -> str:
    """``host``, or a name by which clients accept a self-signed ``cert`` if it does not name ``host``."""
    names = () if cert is None else _self_signed(cert).get("subjectAltName", ())
    if any(_spelt(name) == _spelt(host) for _, name in names):
        return host
    return next((name for kind, name in names if kind == "DNS" and "*" not in name), host)


def _spelt(host: str) -> str:
    """A name, or an address in its shortest form."""
    try:
        return str(ip_address(host.strip("[]\n ")))
    except ValueError:
        return host


def _reachable(host: str) -> str:
    """An address of this machine for one that means all of them."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _program() -> str:
    """How the reader's shell finds this very program: by name where that works, else by path."""
    script = sys.argv[0]
    if script.endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m specdec.cli.main"
    found = shutil.which("specdec")
    if found is not None and os.path.exists(script) and os.path.samefile(found, script):
        return "specdec"
    return shlex.quote(script)


@click.command("status")
@asks_server
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status_command(ask: Ask, model: str, as_json: bool) -> None:
    """Show which models a server runs, and how busy --model is now, by default the first."""

    async def look(client: Client) -> tuple[EngineInfo, ServerLoad, dict[str, bool]]:
        info = await client.info(CONNECT_S, model=model)
        return info, await client.load(model=model), await client.readiness(CONNECT_S)

    info, load, ready = ask(look)
    if as_json:
        click.echo(json.dumps({"info": asdict(info), "load": asdict(load), "ready": ready}))
        return
    drafted = load.drafting_steps / load.steps if load.steps else 0.0
    states = [f"{name} {'is ready' if takes else 'takes no requests now'}" for name, takes in ready.items()]
    for word, text in (
        ("state", ", ".join(states)),
        ("model", f"{info.target}, {info.dtype}, {info.kernels} kernels, {info.numeric_mode}, specdec {info.version}"),
        ("drafters", (", ".join(info.drafters) or "none") + (f"; draft model {info.draft}" if info.draft else "")),
        ("requests", f"{load.running_requests} running, {load.waiting_requests} waiting"),
        ("KV cache", f"{load.kv_usage:.0%} of {info.kv_tokens:,} tokens in use"),
        (
            "speed",
            f"{load.tokens_per_second:.1f} tokens/s of late; {drafted:.0%} of {load.steps} steps verified drafts",
        ),
        ("prompts", f"{load.prompt_tokens} tokens, {load.hit_rate:.0%} of them from the prefix cache"),
    ):
        click.echo(f"{word:9} {text}")


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
@click.option("--max-priority", type=int, help="Highest priority; requests with a higher one run at this.")
def new_command(file: Path, name: str, tenant: str, admin: bool, **limits: float | None) -> None:
    """Make a key and print it, this once; the file gets its hash. A running server takes it at once."""
    from pydantic import ValidationError

    from server.auth.keys import KeyEntry, add_key, key_hash, new_key
    from specdec.config import reason_of

    key = new_key()
    entry = {"name": name, "tenant": tenant, "hash": key_hash(key), "admin": admin, "limits": limits}
    try:
        checked = KeyEntry.model_validate(entry)
    except ValidationError as error:
        found = [f"--{str(e['loc'][-1]).replace('_', '-')}: {reason_of(e, KeyEntry)}" for e in error.errors()]
        raise click.UsageError("; ".join(found)) from None
    add_key(file, checked)
    click.echo(f"added {name} of {tenant} to {file}", err=True)
    click.echo("this is the key; it is not kept anywhere, so keep it now:", err=True)
    click.echo(key)
