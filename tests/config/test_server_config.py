"""Keys and certificates that can not be meant so are refused when the configuration is read."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config import load_config
from specdec.errors import ConfigError


def server(**values: Any) -> dict[str, Any]:
    return {f"server.{name}": value for name, value in values.items()}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.example.org"])
def test_keys_in_the_clear_are_refused_off_loopback(host: str) -> None:
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
def test_halves_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, server(**values))
