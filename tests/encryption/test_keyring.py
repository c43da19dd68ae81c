"""Keyrings: the text form of keys, keys that are refused, and key files that change."""

from __future__ import annotations

import base64
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.encryption.keyring import new_key
from limpet.errors import Corrupt, InvalidValue
from limpet.opening import find_keyring
from tests.encryption.support import line, replace_file

ONE, TWO = bytes(range(32)), bytes(range(32, 64))
TEXT = base64.b64encode(ONE).decode()


def test_the_first_key_is_the_current_one() -> None:
    assert limpet.Keyring({"b": ONE, "a": TWO}).current == "b"
    assert limpet.Keyring({"b": ONE, "a": TWO}, current="a").current == "a"
    assert limpet.Keyring.parse(f"{line('b', ONE)}{line('a', TWO)}").ids == ["b", "a"]


@pytest.mark.parametrize("between", [",", "\n", " , ", "\n\n# a comment\n", "\r\n"])
def test_keys_stand_on_lines_or_between_commas(between: str) -> None:
    keyring = limpet.Keyring.parse(f"{line('a', ONE).strip()}{between}{line('b', TWO).strip()}\n")

    assert (keyring.ids, keyring.current) == (["a", "b"], "a")


def test_a_new_key_can_be_used_as_it_is_printed() -> None:
    first, second = new_key(), new_key()

    assert limpet.Keyring.parse(":".join(first)).ids == [first[0]]
    assert first[1] != second[1]


WRONG: dict[str, Any] = {
    "nothing": "",
    "plain alone": "plain",
    "no id": TEXT,
    "an empty id": f":{TEXT}",
    "a long id": f"{'k' * 33}:{TEXT}",
    "letters of an id": f"K 1:{TEXT}",
    "not base64": "k1:not base64!",
    "a short key": f"k1:{base64.b64encode(ONE[:16]).decode()}",
    "a long key": f"k1:{base64.b64encode(ONE + ONE).decode()}",
    "an id twice": f"k1:{TEXT},k1:{base64.b64encode(TWO).decode()}",
    "the id plain": f"plain:{TEXT}",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_what_is_no_key_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(InvalidValue) as raised:
        limpet.Keyring.parse(text)

    assert TEXT[:8] not in str(raised.value)
    assert "base64!" not in str(raised.value)


@pytest.mark.parametrize(
    "keys",
    [{}, {"k1": ONE[:31]}, {"k1": TEXT}, {"": ONE}, {1: ONE}, {"plain": ONE}, {"k1": bytearray(ONE)}],
    ids=["none", "a short key", "text", "an empty id", "a number", "the id plain", "not bytes"],
)
def test_what_is_no_keyring_is_refused(keys: Any) -> None:
    with pytest.raises(InvalidValue):
        limpet.Keyring(keys)
    with pytest.raises(InvalidValue, match="not in the keyring"):
        limpet.Keyring({"k1": ONE}, current="k2")


async def test_a_store_takes_a_keyring_and_nothing_else() -> None:
    wrong: Any = {"k1": ONE}

    with pytest.raises(InvalidValue, match=r"limpet\.Keyring"):
        await limpet.open("memory:", encryption=wrong)


def test_nothing_shows_a_key() -> None:
    keyring = limpet.Keyring({"k1": ONE, "k2": TWO})

    for text in (repr(keyring), str(keyring), repr(keyring.ring()), repr(vars(keyring))):
        assert TEXT not in text
        assert ONE.hex() not in text
        assert repr(ONE)[2:10] not in text
    with pytest.raises((TypeError, pickle.PicklingError)):
        pickle.dumps(keyring)


# Where keys are found ---------------------------------------------------------


def test_keys_of_the_call_go_before_those_of_the_url_and_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMPET_ENCRYPTION_KEYS", line("env", ONE))
    monkeypatch.setenv("OTHER", line("other", ONE))
    (tmp_path / "keys").write_text(line("file", ONE))
    given = limpet.Keyring({"given": ONE})

    found = [
        find_keyring(given, "env:OTHER"),
        find_keyring(None, "env:OTHER"),
        find_keyring(None, f"file:{tmp_path}/keys"),
        find_keyring(None, None),
    ]

    assert [keyring.current for keyring in found if keyring] == ["given", "other", "file", "env"]
    assert find_keyring(None, "off") is None
    monkeypatch.delenv("LIMPET_ENCRYPTION_KEYS")
    assert find_keyring(None, None) is None


@pytest.mark.parametrize(
    ("url", "left"),
    [
        ("sqlite:///a.db?encryption=env:K", "sqlite:///a.db"),
        ("sqlite:///a.db?encryption=env:K&synchronous=normal", "sqlite:///a.db?synchronous=normal"),
        ("postgresql://u:p?w@h/db?schema=s&encryption=file:/k", "postgresql://u:p?w@h/db?schema=s"),
        ("sqlite:///a.db?synchronous=normal", "sqlite:///a.db?synchronous=normal"),
    ],
)
def test_the_option_is_removed_before_an_engine_sees_the_url(url: str, left: str) -> None:
    from limpet.urls import Address

    assert Address.parse(url).without("encryption") == Address.parse(left)


# Files ------------------------------------------------------------------------


def test_a_file_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    replace_file(file, line("k1", ONE))
    with limpet.sync.open("memory:", encryption=limpet.Keyring.from_file(file)) as store:
        store.put("a", 1)
        replace_file(file, line("k2", TWO) + line("k1", ONE))
        store.put("b", 2)

        assert [store.get(key) for key in "ab"] == [1, 2]
        assert {seals.key_id: seals.entries for seals in store.seals()} == {"k1": 1, "k2": 1}
        replace_file(file, line("k2", TWO))
        with pytest.raises(Corrupt, match="'k1'"):
            store.get("a")


@pytest.mark.parametrize("text", ["", "no key", "k1:short", None], ids=repr)
def test_a_file_that_cannot_be_read_leaves_the_keys_as_they_were(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    replace_file(file, line("k1", ONE))
    keyring = limpet.Keyring.from_file(file)
    if text is None:
        file.unlink()
    else:
        replace_file(file, text)

    with caplog.at_level(logging.WARNING):
        assert [keyring.current for _ in range(3)] == ["k1"] * 3

    assert len(caplog.records) == (text is not None)
    assert TEXT[:8] not in caplog.text
    replace_file(file, line("k2", TWO))
    assert keyring.current == "k2"


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)

    with pytest.raises(InvalidValue, match=r"pip install 'limpet\[encryption\]'"):
        limpet.Keyring({"k1": ONE})


async def test_behind_a_server_encryption_is_the_servers() -> None:
    """A client that encrypted by itself would hide values that the server has to read."""
    with pytest.raises(InvalidValue, match="the server encrypts"):
        await limpet.open("http://127.0.0.1:1", encryption=limpet.Keyring({"k1": ONE}))
