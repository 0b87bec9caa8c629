"""What the replicas of one release can not share, though they have the same settings: files that they write, and
addresses that they listen at. ``{replica}`` in any text of the settings stands for the replica's id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec.config import Config
from specdec.errors import ConfigError

PLACEHOLDER = "{replica}"


def filled(settings: Any, replica_id: str) -> Any:
    """``settings`` of one replica."""
    if isinstance(settings, str):
        return settings.replace(PLACEHOLDER, replica_id)
    if isinstance(settings, dict):
        return {name: filled(value, replica_id) for name, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [filled(value, replica_id) for value in settings]
    return settings


def check_files(config: Config) -> None:
    """Raises ValueError for files and folders that every replica would write, by field."""
    for field, place in _written(config):
        if place is not None and PLACEHOLDER not in str(place):
            raise ValueError(f"{field}: every replica would write {place}; put {PLACEHOLDER}, its id, into the path")


def check_addresses(config: Config, release: str) -> None:
    """For replicas of ``release`` that share a machine.

    Raises:
        ConfigError: a replica would listen at a port that the next one needs too.
    """
    for field, address in _listened_at(config):
        if address.startswith("tcp://"):
            raise ConfigError(
                f"settings of {release}: {field}: replicas on one machine can not all listen at {address}; "
                f"use ipc:// with {PLACEHOLDER} in the path, or connect: true where the router listens"
            )


def _written(config: Config) -> Iterator[tuple[str, Any]]:
    engines = {f"engines.{name}": engine for name, engine in config.engines.items()} or {"engine": config.engine}
    for name, engine in engines.items():
        yield f"{name}.speculation.trace_file", engine.speculation.trace_file
    yield "server.capture_dir", config.server.capture_dir
    yield "server.experiments.folder", config.server.experiments.folder
    for field, address in _listened_at(config):
        if address.startswith("ipc://"):
            yield field, address


def _listened_at(config: Config) -> Iterator[tuple[str, str]]:
    events = config.server.kv_events
    if events.endpoint is not None and not events.connect:
        yield "server.kv_events.endpoint", events.endpoint
    if events.replay_endpoint is not None:
        yield "server.kv_events.replay_endpoint", events.replay_endpoint
