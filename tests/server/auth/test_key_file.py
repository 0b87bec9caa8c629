"""The file of keys: read strictly, changed safely."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.auth.keys import KeyEntry, add_key, key_hash
from server.auth.principal import Limits
from specdec.errors import ConfigError
from tests.server.auth.key_files import make_key, read_keys

HASH = key_hash("k")


def entry(name: str = "a", key: str = "k", tenant: str = "t", **rest: object) -> KeyEntry:
    return KeyEntry(name=name, tenant=tenant, hash=key_hash(key), **rest)  # type: ignore[arg-type]


def test_added_keys_are_read_back_and_comments_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    limits = Limits(requests_per_minute=2.5, tokens_per_minute=1000, max_concurrent=3, max_priority=-1)
    first, second = entry(), entry("b", "l", "other", admin=True, limits=limits)
    add_key(path, first)
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text() + "# of the other team:")  # without a line's end
    path.chmod(0o640)
    add_key(path, second)
    assert read_keys(path) == [first, second]
    assert "# of the other team:\n" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["keys.yaml"]
    assert second.principal().limits == limits


@pytest.mark.parametrize("exists", [True, False])
def test_bug_a_key_added_through_a_link_is_in_the_file_that_it_names(exists: bool, tmp_path: Path) -> None:
    target, link = tmp_path / "shared" / "keys.yaml", tmp_path / "keys.yaml"
    target.parent.mkdir()
    link.symlink_to("shared/keys.yaml")
    if exists:
        add_key(target, entry("z", "z"))
    add_key(link, entry())
    assert link.is_symlink()
    assert read_keys(target)[-1] == entry()
    assert [p.name for p in target.parent.iterdir()] == ["keys.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "not valid YAML"),
        ("- name: 2024-13-45", "not valid YAML"),
        ("a: b", "valid list"),
        (f"- {{name: a, tenant: t, hash: '{HASH}', admn: true}}", "0.admn"),
        (f"- {{name: a/b, tenant: t, hash: '{HASH}'}}", "0.name"),
        (f'- {{name: a, tenant: "t\\n", hash: "{HASH}"}}', "0.tenant"),
        (f"- {{name: a, tenant: '', hash: '{HASH}'}}", "0.tenant"),
        (f"- {{name: a, tenant: t, hash: '{HASH}', limits: {{requests_per_minute: 0}}}}", "requests_per_minute"),
        (f"- {{name: a, tenant: t, hash: '{HASH}', limits: {{tokens_per_minute: .inf}}}}", "tokens_per_minute"),
        (f"- {{name: a, tenant: t, hash: '{HASH}', limits: {{max_concurrent: 0}}}}", "max_concurrent"),
        (f"- {{name: a, tenant: t, hash: '{HASH}'}}\n- {{name: b, tenant: t, hash: '{HASH}'}}", "'b' has the hash"),
        (f"- {{name: a, tenant: t, hash: '{HASH}'}}\n- {{name: a, tenant: t, hash: 'sha256:{'0' * 64}'}}", "the name"),
        ("- {name: a, tenant: t, hash: sd-my-secret-key}", "specdec keys new"),
        (f"- name: a\n  tenant: t\n  hash: '{HASH}'\n  tenant: u", "line 4: the key `tenant` is given twice"),
    ],
)
def test_an_error_names_file_and_field_without_secrets(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert message in str(caught.value)
    assert "keys.yaml" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "Value error" not in str(caught.value)
    before = path.read_text()
    with pytest.raises(ConfigError):
        add_key(path, entry("z", "z"))
    assert path.read_text() == before


def test_a_file_that_cannot_be_read_or_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be changed"):
        add_key(tmp_path / "none" / "keys.yaml", entry())
    flow = tmp_path / "flow.yaml"
    flow.write_text(f"[{{name: a, tenant: t, hash: '{HASH}'}}]\n")
    with pytest.raises(ConfigError, match=r"plain list|not valid"):
        add_key(flow, entry("b", "l"))


def test_duplicate_names_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    make_key(path, "a")
    with pytest.raises(ConfigError, match="'a' has the name of another"):
        make_key(path, "a")
    assert len(read_keys(path)) == 1


def test_an_entry_with_the_hash_of_another_needs_its_own(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, entry("a", "key"))
    path.write_text(path.read_text() + path.read_text().replace("name: a", "name: b"))
    with pytest.raises(ConfigError, match="'b' has the hash of another; give it its own"):
        add_key(path, entry("c", "other"))
