"""Keys and encryption: values are encrypted before an engine stores them, and bound to their entry.

A keyring has keys by their ids. A value is encrypted by AES-GCM with the current key and a random nonce, and the
ciphertext names its key. So values of older keys stay readable while these keys are in the ring. Namespace, family, key
and part are authenticated with the ciphertext. A ciphertext that was copied to another entry does not decrypt there,
and one that was altered does not decrypt at all.

Time is not authenticated: an attacker that can write to the database can put back an older value of the same entry.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from limpet.codec import Stored
from limpet.errors import Corrupt, InvalidValue
from limpet.model import Family
from limpet.urls import KEYS_VARIABLE

__all__ = ["PLAIN", "Keyring", "Part", "Ring", "new_key"]

log = logging.getLogger("limpet.encryption")

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
DIGEST_BYTES: Final = 16
PLAIN: Final = "plain"
"""The id that stands for no encryption. Like an old key in a ring, it allows reading, and new writes never use it."""

Part = Literal["value", "meta", "result"]
"""The encrypted parts of an entry: its value, its meta and, in a receipt, the values that its request returned."""

_ID: Final = re.compile(r"[a-z0-9_.-]{1,32}\Z")
# No JSON and no UTF-8 text starts with these bytes. The last byte is the version of the format.
_MAGIC: Final = b"\x8fLs\x01"
_BINDING: Final = "limpet sealed 1"
_META: Final = re.compile(rb'\{ ?"\$sealed": ?"([A-Za-z0-9+/=]+)" ?\}\Z')

_pack = msgspec.msgpack.Encoder(order="sorted").encode
_unpack_fields = msgspec.msgpack.Decoder(dict[str, bytes]).decode
_unpack_results = msgspec.msgpack.Decoder(list[bytes | dict[str, bytes] | None]).decode

S = TypeVar("S")

_VALUE, _RECORD, _PATCHED = b"v", b"r", b"p"


class _Key:
    """One key of a ring. No repr or message contains it."""

    __slots__ = ("_aead", "_mac", "id")

    def __init__(self, key_id: str, key: bytes) -> None:
        import hmac

        self.id = key_id
        self._aead: Any = _aead(key)
        # A separate MAC key, so that request digests reveal nothing about encrypted values.
        self._mac = hmac.digest(key, b"limpet request digest", "sha256")

    def encrypt(self, plain: bytes, binding: tuple[str, ...]) -> bytes:
        name, nonce = self.id.encode(), os.urandom(NONCE_BYTES)
        ciphertext: bytes = self._aead.encrypt(nonce, plain, _pack((*binding, self.id)))
        return b"%b%c%b%b%b" % (_MAGIC, len(name), name, nonce, ciphertext)

    def decrypt(self, nonce: bytes, ciphertext: bytes, binding: tuple[str, ...]) -> bytes:
        plain: bytes = self._aead.decrypt(nonce, ciphertext, _pack((*binding, self.id)))
        return plain

    def digest(self, items: tuple[object, ...]) -> bytes:
        import hmac

        return hmac.digest(self._mac, _pack(items), "sha256")[:DIGEST_BYTES]


def _aead(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError as missing:
        raise InvalidValue("encryption needs the cryptography package: pip install 'limpet[encryption]'") from missing
    return AESGCM(key)


class Ring:
    """The keys of a keyring at one moment: the current one encrypts, and all of them decrypt."""

    __slots__ = ("_current", "_keys", "accepts_plain")

    def __init__(self, keys: Mapping[str, bytes], current: str, accepts_plain: bool) -> None:
        self._keys = {key_id: _Key(key_id, key) for key_id, key in keys.items()}
        self._current = self._keys[current]
        self.accepts_plain = accepts_plain

    @property
    def current(self) -> str:
        """The id of the key that encrypts."""
        return self._current.id

    @property
    def ids(self) -> list[str]:
        """The ids of all keys."""
        return list(self._keys)

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._keys

    def encrypt(self, plain: bytes, namespace: str, family: Family, key: str, part: Part) -> bytes:
        """Encrypt one part of this entry."""
        return self._current.encrypt(plain, (_BINDING, namespace, family, key, part))

    def decrypt(self, encrypted: bytes, namespace: str, family: Family, key: str, part: Part) -> bytes:
        """Decrypt one part of this entry. Raises `Corrupt`."""
        key_id = key_id_of(encrypted)
        start = len(_MAGIC) + 1 + len(key_id)
        decrypting = self._keys.get(key_id)
        if decrypting is None:
            name = f"key {key_id!r}" if _ID.match(key_id) else "a key of an invalid id"
            raise Corrupt(f"{_describe(namespace, key)}: its {part} is encrypted with {name}, which this keyring lacks")
        nonce, ciphertext = encrypted[start : start + NONCE_BYTES], encrypted[start + NONCE_BYTES :]
        try:
            return decrypting.decrypt(nonce, ciphertext, (_BINDING, namespace, family, key, part))
        except Exception as error:
            # The library raises one error for a wrong tag, and others for bytes that are too short to have a tag.
            raise Corrupt(
                f"{_describe(namespace, key)}: its {part} cannot be decrypted with key {key_id!r}: it was altered, "
                "truncated or copied from another entry, or another key has this id"
            ) from error

    # Values, meta and results in the form that engines store -----------------------

    def encrypt_value(
        self, stored: Stored, namespace: str, family: Family, key: str, *, is_patch: bool = False
    ) -> bytes:
        """A value of any kind as raw bytes. They also record whether a field write made it, for the log."""
        if isinstance(stored, bytes):
            plain = _VALUE + stored
        else:
            plain = (_PATCHED if is_patch else _RECORD) + _pack(dict(stored))
        return b"\0" + self.encrypt(plain, namespace, family, key, "value")

    def decrypt_value(self, stored: Stored, namespace: str, family: Family, key: str) -> tuple[Stored, bool]:
        """The value, and whether a field write made it."""
        if not is_encrypted(stored):
            return self._accept_plain(stored, namespace, key, "value"), False
        plain = self.decrypt(stored[1:], namespace, family, key, "value")  # type: ignore[index]
        if plain[:1] == _VALUE:
            return plain[1:], False
        return _unpack_fields(plain[1:]), plain[:1] == _PATCHED

    def encrypt_meta(self, meta_json: bytes, namespace: str, family: Family, key: str) -> bytes:
        """A meta as another JSON object, which contains only the encrypted bytes."""
        encrypted = self.encrypt(meta_json, namespace, family, key, "meta")
        return b'{"$sealed":"%b"}' % base64.b64encode(encrypted)

    def decrypt_meta(self, meta_json: bytes, namespace: str, family: Family, key: str) -> bytes:
        """The meta that `encrypt_meta` encrypted."""
        encrypted = _encrypted_meta(meta_json)
        if encrypted is None:
            return self._accept_plain(meta_json, namespace, key, "meta")
        return self.decrypt(encrypted, namespace, family, key, "meta")

    def encrypt_results(self, results: list[Stored | None], namespace: str, request_id: str) -> bytes:
        """The values that a repeated request returns again."""
        plain = _pack([dict(one) if isinstance(one, Mapping) else one for one in results])
        return self.encrypt(plain, namespace, "receipt", request_id, "result")

    def decrypt_results(
        self, encrypted: bytes, namespace: str, request_id: str
    ) -> list[bytes | dict[str, bytes] | None]:
        """The values that `encrypt_results` encrypted."""
        return _unpack_results(self.decrypt(encrypted, namespace, "receipt", request_id, "result"))

    def digest(self, namespace: str, request_id: str, digest: bytes) -> bytes:
        """A hash of a request that reveals nothing without the key, not even that two requests are alike."""
        return self._current.digest((namespace, request_id, digest))

    def digests(self, namespace: str, request_id: str, digest: bytes) -> set[bytes]:
        """The hashes that a request may have, by the current key and by older ones."""
        return {key.digest((namespace, request_id, digest)) for key in self._keys.values()}

    def _accept_plain(self, stored: S, namespace: str, key: str, part: Part) -> S:
        if self.accepts_plain:
            return stored
        raise Corrupt(
            f"{_describe(namespace, key)}: its {part} is not encrypted. If it was written before encryption was turned "
            f"on, add '{PLAIN}' to the keys and run 'limpet encryption rotate'"
        )


def _describe(namespace: str, key: str) -> str:
    text = repr(key)
    return f"{text if len(text) <= 120 else text[:116] + '...'} in namespace {namespace!r}"


def is_encrypted(stored: Stored) -> bool:
    """Whether a value, as an engine stores it, has the form of an encrypted one."""
    return isinstance(stored, bytes) and stored.startswith(b"\0" + _MAGIC)


def key_id_of(encrypted: bytes, *, start: int = 0) -> str:
    """The id of the key that encrypted this."""
    id_start = start + len(_MAGIC) + 1
    id_bytes = encrypted[id_start - 1] if len(encrypted) >= id_start else 0
    return encrypted[id_start : id_start + id_bytes].decode(errors="replace")


def key_id_of_value(stored: Stored) -> str:
    """The id of the key that encrypted a value, as an engine stores it; ``plain`` if none did."""
    return key_id_of(stored, start=1) if isinstance(stored, bytes) and is_encrypted(stored) else PLAIN


def key_id_of_meta(meta_json: bytes) -> str:
    """The id of the key that encrypted a meta, as an engine stores it; ``plain`` if none did."""
    encrypted = _encrypted_meta(meta_json)
    return PLAIN if encrypted is None else key_id_of(encrypted)


def _encrypted_meta(meta_json: bytes) -> bytes | None:
    """The encrypted bytes in a meta. A database may have added spaces to the JSON."""
    found = _META.match(meta_json)
    if found is None:
        return None
    try:
        encrypted = base64.b64decode(found[1], validate=True)
    except (ValueError, binascii.Error):
        return None
    return encrypted if encrypted.startswith(_MAGIC) else None


# Keyrings ---------------------------------------------------------------------


class Keyring:
    """The keys of an encrypted store. The current key encrypts new writes; all keys decrypt.

    The keys may be replaced while stores use the keyring. A keyring from a file follows the file: after it changes, the
    next call of a store uses the new keys.
    """

    def __init__(self, keys: Mapping[str, bytes], *, current: str | None = None, plain: bool = False) -> None:
        """Make a keyring.

        Args:
            keys: Keys of 32 bytes by their ids: 1 to 32 of ``a-z 0-9 _ . -``.
            current: The id of the key that encrypts; the first if not given.
            plain: Whether values that are not encrypted may be read, while a store is being encrypted.
        """
        self._lock = threading.Lock()
        self._file: Path | None = None
        self._loaded_stamp: tuple[int, int, int] | None = None
        self._ring = _make_ring(keys, current, plain)

    @classmethod
    def parse(cls, text: str) -> Keyring:
        """A keyring from text: ``id:key`` in base64, separated by lines or commas, the current key first."""
        keys, plain = _parse_keys(text, "the keys")
        return cls(keys, plain=plain)

    @classmethod
    def from_env(cls, name: str = KEYS_VARIABLE) -> Keyring:
        """A keyring from the text in an environment variable."""
        text = os.environ.get(name)
        if not text:
            raise InvalidValue(
                f"the environment variable {name} holds no encryption keys: make one by 'limpet encryption new'"
            )
        keys, plain = _parse_keys(text, name)
        return cls(keys, plain=plain)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Keyring:
        """A keyring from the text in a file. Lines that start with ``#`` are comments."""
        file = Path(path)
        try:
            stamp = _stamp(file)
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(f"cannot read the encryption keys in {str(file)!r}: {_reason(error)}") from error
        keys, plain = _parse_keys(text, str(file))
        keyring = cls(keys, plain=plain)
        keyring._file, keyring._loaded_stamp = file, stamp
        return keyring

    @property
    def current(self) -> str:
        """The id of the key that encrypts."""
        return self.ring().current

    @property
    def ids(self) -> list[str]:
        """The ids of all keys."""
        return self.ring().ids

    def replace(self, keys: Mapping[str, bytes], *, current: str | None = None, plain: bool = False) -> None:
        """Use other keys from the next call on, in all stores that were opened with this keyring."""
        self._ring = _make_ring(keys, current, plain)

    def ring(self) -> Ring:
        """The keys at this moment."""
        if self._file is not None:
            self._reload_if_changed(self._file)
        return self._ring

    def _reload_if_changed(self, file: Path) -> None:
        """Read the file again if it has changed. If it cannot be read, the keys stay as they are."""
        try:
            stamp = _stamp(file)
        except OSError:
            return
        if stamp == self._loaded_stamp:
            return
        with self._lock:
            if stamp == self._loaded_stamp:
                return
            self._loaded_stamp = stamp
            try:
                keys, plain = _parse_keys(file.read_text(encoding="utf-8"), "the file")
                self._ring = _make_ring(keys, None, plain)
            except (OSError, UnicodeDecodeError, InvalidValue) as error:
                log.warning("the encryption keys stay as they were: their file cannot be used: %s", _reason(error))

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._ring.ids)}; current {self._ring.current})"


def new_key() -> tuple[str, str]:
    """A new key as text: its id, which starts with the day, and the key in base64."""
    import datetime

    day = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
    return f"k{day}-{os.urandom(2).hex()}", base64.b64encode(os.urandom(KEY_BYTES)).decode()


def _make_ring(keys: Mapping[str, bytes], current: str | None, plain: bool) -> Ring:
    if not keys:
        raise InvalidValue("a keyring holds at least one key: make one by 'limpet encryption new'")
    given: Iterable[tuple[object, object]] = keys.items()
    for key_id, key in given:
        if not isinstance(key_id, str) or not _ID.match(key_id) or key_id == PLAIN:
            raise InvalidValue(
                f"the id of an encryption key is 1 to 32 characters of a-z, 0-9, '_', '.' and '-', and not '{PLAIN}'"
            )
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            advice = "make one by 'limpet encryption new'"
            raise InvalidValue(f"encryption key {key_id!r} is not {KEY_BYTES} bytes: {advice}")
    first = next(iter(keys)) if current is None else current
    if first not in keys:
        raise InvalidValue(f"the current encryption key {first!r} is not in the keyring")
    return Ring(keys, first, plain)


def _parse_keys(text: str, name: str) -> tuple[dict[str, bytes], bool]:
    """Parse keys, each an id, a colon and the key in base64. No message contains any of the text."""
    keys: dict[str, bytes] = {}
    plain = False
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for number, item in enumerate(filter(None, (part.strip() for line in lines for part in line.split(","))), 1):
        if item == PLAIN:
            plain = True
            continue
        key_id, _, encoded = item.partition(":")
        try:
            key = base64.b64decode(encoded, validate=True)
        except (ValueError, binascii.Error):
            key = b""
        if not _ID.match(key_id) or len(key) != KEY_BYTES:
            raise InvalidValue(
                f"item {number} of {name} is not an encryption key: write ID:KEY, as 'limpet encryption new' prints it"
            )
        if key_id in keys:
            raise InvalidValue(f"{name} has two encryption keys of the id {key_id!r}")
        keys[key_id] = key
    if not keys:
        raise InvalidValue(f"{name} holds no encryption key: make one by 'limpet encryption new'")
    return keys, plain


def _stamp(file: Path) -> tuple[int, int, int]:
    """Facts that change when the content of a file changes, without reading it."""
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
