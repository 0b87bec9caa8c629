"""Inconsistent keys and certificates are rejected when the configuration is read."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config import load_config
from specdec.errors import ConfigError


def server(**values: Any) -> dict[str, Any]:
    return {f"server.{name}": value for name, value in values.items()}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.example.org"])
def test_keys_without_tls_are_rejected_off_loopback(host: str) -> None:
    with pytest.raises(ConfigError, match=r"keys_file.*in the clear.*tls_cert"):
        load_config(None, server(host=host, keys_file="k"))
    assert not load_config(None, server(host=host)).server.on_loopback
    load_config(None, server(host=host, keys_file="k", keys_without_tls=True))
    load_config(None, server(host=host, keys_file="k", tls_cert="c", tls_key="k"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_keys_need_no_tls(host: str) -> None:
    assert load_config(None, server(host=host, keys_file="k")).server.on_loopback


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tls_cert": "c"}, "tls_cert needs tls_key"),
        ({"tls_key": "k"}, "tls_key needs tls_cert"),
        ({"tls_client_ca": "a"}, "tls_client_ca needs tls_cert"),
        ({"max_queued_tokens": -1}, "max_queued_tokens"),
    ],
)
def test_incomplete_pairs_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, server(**values))


ENDPOINT = "tcp://127.0.0.1:5557"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_events_on_loopback(host: str) -> None:
    values = {"kv_events.endpoint": f"tcp://{host}:5557", "kv_events.replay_endpoint": "ipc:///run/replay"}
    assert load_config(None, server(**values)).server.kv_events.endpoint == f"tcp://{host}:5557"


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "10.1.2.3", "router.example.org"])
@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_events_off_loopback_need_explicit_permission(host: str, name: str) -> None:
    values = {"kv_events.endpoint": ENDPOINT, f"kv_events.{name}": f"tcp://{host}:5558"}
    with pytest.raises(ConfigError, match=rf"{name}: events carry the tokens of prompts.*off_loopback"):
        load_config(None, server(**values))
    load_config(None, server(**values, **{"kv_events.off_loopback": True}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"endpoint": "127.0.0.1:5557"}, r"must be tcp://HOST:PORT or ipc://PATH"),
        ({"endpoint": "tcp://127.0.0.1"}, r"must be tcp://HOST:PORT or ipc://PATH"),
        ({"endpoint": "tcp://127.0.0.1:0"}, r"must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, r"must be tcp://HOST:PORT"),
        ({"endpoint": "pgm://127.0.0.1:5557"}, r"must be tcp://HOST:PORT"),
        ({"replay_endpoint": ENDPOINT}, r"replay_endpoint needs endpoint"),
        ({"endpoint": "ipc://k", "replay_endpoint": "ipc://k"}, r"replay_endpoint must be another address"),
        ({"endpoint": ENDPOINT, "format": "json"}, r"kv_events\.format"),
    ],
)
def test_inconsistent_event_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, server(**{f"kv_events.{name}": value for name, value in values.items()}))


def test_with_keys_events_of_tenants_need_explicit_permission() -> None:
    values = {"keys_file": "k", "kv_events.endpoint": ENDPOINT}
    with pytest.raises(ConfigError, match=r"kv_events\.salted.*every tenant"):
        load_config(None, server(**values))
    load_config(None, server(**values, **{"kv_events.salted": True}))


def test_models_of_a_server_publish_separately() -> None:
    values = server(**{"kv_events.endpoint": ENDPOINT, "kv_events.replay_endpoint": "ipc:///run/replay"})
    events = load_config(None, values).server.kv_events
    assert events.of_model(0) == events
    moved = events.of_model(2)
    assert (moved.endpoint, moved.replay_endpoint) == ("tcp://127.0.0.1:5559", "ipc:///run/replay.2")
