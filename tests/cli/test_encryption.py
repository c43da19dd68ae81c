"""``limpet encryption``, and other commands on an encrypted store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import limpet
import limpet.sync
from limpet.semantic.store import Audit, SemanticStore
from tests.cli.support import Limpet

KEY = "tenant/acme/project/docs/delta"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def sealed(url: str, keys: Path) -> Limpet:
    """Runs ``limpet`` on an encrypted store."""
    keys.write_text(Limpet()("encryption", "new").stdout)
    return Limpet(f"{url}?encryption=file:{keys}")


def ids(keys: Path) -> list[str]:
    return limpet.Keyring.from_file(keys).ids


def test_a_new_key_is_printed_and_kept_nowhere(run: Limpet, tmp_path: Path) -> None:
    first, second = run("encryption", "new").stdout, run.json("encryption", "new")

    assert limpet.Keyring.parse(first).ids == [first.partition(":")[0]]
    assert list(second) == ["id", "key"]
    assert limpet.Keyring.parse(":".join(second.values())).current == second["id"]
    assert list(tmp_path.iterdir()) == []


def test_commands_read_and_write_an_encrypted_store(sealed: Limpet, run: Limpet) -> None:
    sealed("put", "k", "secret")
    sealed("field", "set", "r", "state=open")
    sealed("incr", "n", "5")

    assert sealed("get", "k").stdout == '"secret"\n'
    assert sealed("ls", "--where", "state=open").stdout == "r\n"
    assert sealed("history", "n").exit_code == 0
    assert "secret" not in run("get", "k", "--json").stdout


def test_keys_may_be_in_the_environment(run: Limpet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMPET_ENCRYPTION_KEYS", run("encryption", "new").stdout)

    run("put", "k", "secret")

    assert run("get", "k").stdout == '"secret"\n'
    assert run.json("stat")["encrypted"] is True


def test_keys_are_rotated(sealed: Limpet, keys: Path) -> None:
    for number in range(3):
        sealed("put", f"{number}", f"{number}", "--ttl", "1h")
    sealed("put", "k", "1", "-n", "other")
    (old,) = ids(keys)
    keys.write_text(Limpet()("encryption", "new").stdout + keys.read_text())
    new = ids(keys)[0]

    result = sealed("encryption", "rotate", "default", "other")

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"default: 3 of 3 entries were encrypted again, with key {new}",
        f"other: 1 of 1 entries were encrypted again, with key {new}",
    ]
    assert f"keep {old}: the log of default still needs it" in result.stderr
    assert sealed.json("encryption", "rotate") == {
        "namespace": "default",
        "entries": 3,
        "resealed": 0,
        "key": new,
        "still_used": [old],
    }
    assert sealed("encryption", "list").stdout.splitlines() == [
        f"default: 3 entries, 3 changes: key {new} encrypts",
        f"default: 0 entries, 3 changes: key {old} is read",
    ]
    listed = sealed.documents("encryption", "list", "other")
    assert [(each["key"], each["current"], each["entries"], each["changes"]) for each in listed] == [
        (new, True, 1, 1),
        (old, False, 0, 1),
    ]


def test_an_audited_namespace_is_rotated_with_its_trail(
    sealed: Limpet, keys: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare() -> None:
        async with limpet.open(f"{url}?encryption=file:{keys}") as store:
            kept = SemanticStore(store, audit=Audit(b"k" * 32))
            await kept.kv_put(KEY, {"n": 1}, writer="alice", semantics={"purpose": "checkpoint", "ttlSeconds": 60})

    asyncio.run(prepare())
    monkeypatch.setenv("LIMPET_AUDIT_KEYS", f"1:{(b'k' * 32).hex()}")
    keys.write_text(Limpet()("encryption", "new").stdout + keys.read_text())

    # The entry, its row, its head and its copy.
    assert sealed.json("encryption", "rotate")["resealed"] == 4
    keys.write_text(keys.read_text().splitlines()[0])
    assert sealed.json("audit", "verify")["sound"] is True
    assert sealed.json("audit", "seal") == {"sealed": 1}


def test_a_plain_store_is_encrypted(sealed: Limpet, run: Limpet, keys: Path) -> None:
    run("put", "k", "secret")
    refused = sealed("get", "k")
    text = keys.read_text()
    keys.write_text(f"{text}plain\n")

    assert refused.exit_code != 0
    assert "is not encrypted" in refused.stderr
    assert sealed("encryption", "rotate").exit_code == 0
    assert "default: 0 entries, 1 changes: not encrypted" in sealed("encryption", "list").stdout
    keys.write_text(text)
    assert sealed("get", "k").stdout == '"secret"\n'


def test_a_store_without_keys_cannot_be_rotated(run: Limpet) -> None:
    run("put", "k", "1")

    result = run("encryption", "rotate")

    assert result.exit_code == 7
    assert "this store is not encrypted" in result.stderr


def test_an_index_is_refused_with_the_reason(sealed: Limpet) -> None:
    sealed("put", "k", '{"n": 1}')

    result = sealed("index", "n")

    assert result.exit_code == 7
    assert "encrypted" in result.stderr


def test_doctor_looks_whether_the_keys_fit(sealed: Limpet, keys: Path, url: str) -> None:
    sealed("put", "k", "1")
    well = {found["check"]: found for found in sealed.documents("doctor")}
    keys.write_text(Limpet()("encryption", "new").stdout)
    ill = sealed("doctor")

    assert well["encryption"]["level"] == "ok"
    assert "a sample of 1 could be decrypted" in well["encryption"]["finding"]
    assert ill.exit_code == 6
    assert "which this keyring lacks" in ill.stdout


def test_a_key_in_a_url_is_refused_and_not_shown(run: Limpet, url: str) -> None:
    key = run("encryption", "new").stdout.strip()

    result = Limpet(f"{url}?encryption={key}")("put", "k", "1")

    assert result.exit_code == 7
    assert key.partition(":")[2] not in result.stderr
    assert "A URL holds no key itself" in result.stderr


def test_tables_are_migrated_whatever_is_in_them(sealed: Limpet) -> None:
    sealed("put", "k", "1")

    assert sealed("migrate", "status").exit_code == 0
