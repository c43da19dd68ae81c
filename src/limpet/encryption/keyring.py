"""Sealing: what is stored is encrypted before an engine sees it, and bound to the place it is stored in.

A keyring has keys by their ids. What is written is sealed with the current one, by AES-GCM and a random nonce, and
says which that was; so what older keys sealed stays readable while they are in the ring. Namespace, family, key and
part go into the seal. What was sealed for one place opens in no other, and what was changed opens nowhere.

A seal says nothing about when: whoever may write the database can put back what was once in the same place.
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

log = logging.getLogger("limpet.sealing")

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
DIGEST_BYTES: Final = 16
PLAIN: Final = "plain"
"""Stands in a ring for what is not sealed: as an old key does, it is read and never written."""

Part = Literal["value", "meta", "result"]
"""What of an entry is sealed: its value, its meta, and of a receipt the values that it answers with."""

_ID: Final = re.compile(r"[a-z0-9_.-]{1,32}\Z")
# Neither JSON nor UTF-8 starts so. The last byte is the version of what follows.
_MAGIC: Final = b"\x8fLs\x01"
_BOUND_TO: Final = "limpet sealed 1"
_META: Final = re.compile(rb'\{ ?"\$sealed": ?"([A-Za-z0-9+/=]+)" ?\}\Z')

_pack = msgspec.msgpack.Encoder(order="sorted").encode
_unpack_fields = msgspec.msgpack.Decoder(dict[str, bytes]).decode
_unpack_results = msgspec.msgpack.Decoder(list[bytes | dict[str, bytes] | None]).decode

S = TypeVar("S")

_VALUE, _RECORD, _PATCHED = b"v", b"r", b"p"


class _Key:
    """One key of a ring. Nothing shows it."""

    __slots__ = ("_aead", "_mac", "id")

    def __init__(self, key_id: str, key: bytes) -> None:
        import hmac

        self.id = key_id
        self._aead: Any = _aead(key)
        # Of its own, so that no hash of a request tells anything of what is sealed.
        self._mac = hmac.digest(key, b"limpet request digest", "sha256")

    def seal(self, plain: bytes, bound: tuple[str, ...]) -> bytes:
        name, nonce = self.id.encode(), os.urandom(NONCE_BYTES)
        sealed: bytes = self._aead.encrypt(nonce, plain, _pack((*bound, self.id)))
        return b"%b%c%b%b%b" % (_MAGIC, len(name), name, nonce, sealed)

    def open(self, nonce: bytes, sealed: bytes, bound: tuple[str, ...]) -> bytes:
        plain: bytes = self._aead.decrypt(nonce, sealed, _pack((*bound, self.id)))
        return plain

    def digest(self, words: tuple[object, ...]) -> bytes:
        import hmac

        return hmac.digest(self._mac, _pack(words), "sha256")[:DIGEST_BYTES]


def _aead(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError as missing:
        raise InvalidValue("encryption needs the cryptography package: pip install 'limpet[encryption]'") from missing
    return AESGCM(key)


class Ring:
    """The keys of one moment: which seals, and which open."""

    __slots__ = ("_current", "_keys", "accepts_plain")

    def __init__(self, keys: Mapping[str, bytes], current: str, accepts_plain: bool) -> None:
        self._keys = {key_id: _Key(key_id, key) for key_id, key in keys.items()}
        self._current = self._keys[current]
        self.accepts_plain = accepts_plain

    @property
    def current(self) -> str:
        """The id of the key that seals."""
        return self._current.id

    @property
    def ids(self) -> list[str]:
        """The ids of all keys."""
        return list(self._keys)

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._keys

    def seal(self, plain: bytes, namespace: str, family: Family, key: str, part: Part) -> bytes:
        """Seal something for its place."""
        return self._current.seal(plain, (_BOUND_TO, namespace, family, key, part))

    def open(self, sealed: bytes, namespace: str, family: Family, key: str, part: Part) -> bytes:
        """What was sealed for this place. Raises `Corrupt`."""
        key_id = key_id_of(sealed)
        at = len(_MAGIC) + 1 + len(key_id)
        held = self._keys.get(key_id)
        if held is None:
            shown = repr(key_id) if _ID.match(key_id) else "that is none"
            raise Corrupt(f"{_place(namespace, key)}: its {part} is sealed with key {shown}, which this keyring lacks")
        try:
            bound = (_BOUND_TO, namespace, family, key, part)
            return held.open(sealed[at : at + NONCE_BYTES], sealed[at + NONCE_BYTES :], bound)
        except Exception as error:
            # The library has one exception for a wrong tag and others for what is too short to have one.
            raise Corrupt(
                f"{_place(namespace, key)}: its {part} does not open with key {key_id!r}: it was altered, cut off or "
                "moved here from another place, or the key is another one of this name"
            ) from error

    # Values, meta and results in the form that engines keep ------------------------

    def seal_value(self, stored: Stored, namespace: str, family: Family, key: str, *, is_patch: bool = False) -> bytes:
        """A value of any kind as raw bytes. That a field write made it is sealed in, for the log to tell."""
        if isinstance(stored, bytes):
            plain = _VALUE + stored
        else:
            plain = (_PATCHED if is_patch else _RECORD) + _pack(dict(stored))
        return b"\0" + self.seal(plain, namespace, family, key, "value")

    def open_value(self, stored: Stored, namespace: str, family: Family, key: str) -> tuple[Stored, bool]:
        """The value, and whether a field write made it."""
        if not is_sealed(stored):
            return self._plain(stored, namespace, key, "value"), False
        plain = self.open(stored[1:], namespace, family, key, "value")  # type: ignore[index]
        if plain[:1] == _VALUE:
            return plain[1:], False
        return _unpack_fields(plain[1:]), plain[:1] == _PATCHED

    def seal_meta(self, meta_json: bytes, namespace: str, family: Family, key: str) -> bytes:
        """A meta as another one, which holds nothing but the seal."""
        sealed = self.seal(meta_json, namespace, family, key, "meta")
        return b'{"$sealed":"%b"}' % base64.b64encode(sealed)

    def open_meta(self, meta_json: bytes, namespace: str, family: Family, key: str) -> bytes:
        """The meta that was sealed."""
        sealed = _sealed_meta(meta_json)
        if sealed is None:
            return self._plain(meta_json, namespace, key, "meta")
        return self.open(sealed, namespace, family, key, "meta")

    def seal_results(self, results: list[Stored | None], namespace: str, request_id: str) -> bytes:
        """The values that a repeated request is answered with."""
        plain = _pack([dict(one) if isinstance(one, Mapping) else one for one in results])
        return self.seal(plain, namespace, "receipt", request_id, "result")

    def open_results(self, sealed: bytes, namespace: str, request_id: str) -> list[bytes | dict[str, bytes] | None]:
        """What `seal_results` sealed."""
        return _unpack_results(self.open(sealed, namespace, "receipt", request_id, "result"))

    def digest(self, namespace: str, request_id: str, digest: bytes) -> bytes:
        """A hash of a request that tells nothing to whoever lacks the key, not even that two are alike."""
        return self._current.digest((namespace, request_id, digest))

    def digests(self, namespace: str, request_id: str, digest: bytes) -> set[bytes]:
        """The hashes that a request may have got, under the current key and under older ones."""
        return {key.digest((namespace, request_id, digest)) for key in self._keys.values()}

    def _plain(self, stored: S, namespace: str, key: str, part: Part) -> S:
        if self.accepts_plain:
            return stored
        raise Corrupt(
            f"{_place(namespace, key)}: its {part} is not encrypted. If it was written before encryption was turned "
            f"on, add '{PLAIN}' to the keys and run 'limpet keys rotate'"
        )


def _place(namespace: str, key: str) -> str:
    shown = repr(key)
    return f"{shown if len(shown) <= 120 else shown[:116] + '...'} in namespace {namespace!r}"


def is_sealed(stored: Stored) -> bool:
    """Whether a value, as an engine keeps it, has the form of a sealed one."""
    return isinstance(stored, bytes) and stored.startswith(b"\0" + _MAGIC)


def key_id_of(sealed: bytes, *, start: int = 0) -> str:
    """The id of the key that sealed this."""
    at = start + len(_MAGIC) + 1
    id_bytes = sealed[at - 1] if len(sealed) >= at else 0
    return sealed[at : at + id_bytes].decode(errors="replace")


def key_id_of_value(stored: Stored) -> str:
    """The id of the key that sealed a value, as an engine keeps it; ``plain`` when none did."""
    return key_id_of(stored, start=1) if isinstance(stored, bytes) and is_sealed(stored) else PLAIN


def key_id_of_meta(meta_json: bytes) -> str:
    """The id of the key that sealed a meta, as an engine keeps it; ``plain`` when none did."""
    sealed = _sealed_meta(meta_json)
    return PLAIN if sealed is None else key_id_of(sealed)


def _sealed_meta(meta_json: bytes) -> bytes | None:
    """The seal in a meta. A database may have put spaces into it."""
    found = _META.match(meta_json)
    if found is None:
        return None
    try:
        sealed = base64.b64decode(found[1], validate=True)
    except (ValueError, binascii.Error):
        return None
    return sealed if sealed.startswith(_MAGIC) else None


# Keyrings ---------------------------------------------------------------------


class Keyring:
    """The keys of an encrypted store. The current one seals what is written; all of them open what is read.

    A keyring may be replaced while stores use it. One that was read from a file follows the file: when that changes,
    the next call of a store finds the new keys.
    """

    def __init__(self, keys: Mapping[str, bytes], *, current: str | None = None, plain: bool = False) -> None:
        """Make a keyring.

        Args:
            keys: Keys of 32 bytes by their ids: 1 to 32 of ``a-z 0-9 _ . -``.
            current: The id of the key that seals; the first when not given.
            plain: Whether what is not encrypted is read as it is, while a store is being encrypted.
        """
        self._lock = threading.Lock()
        self._file: Path | None = None
        self._seen: tuple[int, int, int] | None = None
        self._ring = _checked(keys, current, plain)

    @classmethod
    def parse(cls, text: str) -> Keyring:
        """A keyring of text: ``id:key`` in base64, one a line or between commas, the current one first."""
        keys, plain = _parsed(text, "the keys")
        return cls(keys, plain=plain)

    @classmethod
    def from_env(cls, name: str = KEYS_VARIABLE) -> Keyring:
        """A keyring of the text in an environment variable."""
        text = os.environ.get(name)
        if not text:
            raise InvalidValue(
                f"the environment variable {name} holds no encryption keys: make one by 'limpet keys new'"
            )
        keys, plain = _parsed(text, name)
        return cls(keys, plain=plain)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Keyring:
        """A keyring of the text in a file. Lines that start with ``#`` are remarks."""
        file = Path(path)
        try:
            seen = _stamp(file)
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(f"cannot read the encryption keys in {str(file)!r}: {_why(error)}") from error
        keys, plain = _parsed(text, str(file))
        keyring = cls(keys, plain=plain)
        keyring._file, keyring._seen = file, seen
        return keyring

    @property
    def current(self) -> str:
        """The id of the key that seals."""
        return self.ring().current

    @property
    def ids(self) -> list[str]:
        """The ids of all keys."""
        return self.ring().ids

    def replace(self, keys: Mapping[str, bytes], *, current: str | None = None, plain: bool = False) -> None:
        """Use other keys from the next call on, in all stores that were opened with this keyring."""
        self._ring = _checked(keys, current, plain)

    def ring(self) -> Ring:
        """The keys of this moment."""
        if self._file is not None:
            self._follow(self._file)
        return self._ring

    def _follow(self, file: Path) -> None:
        """Read the file again when it is another. One that cannot be read leaves the keys as they are."""
        try:
            stamp = _stamp(file)
        except OSError:
            return
        if stamp == self._seen:
            return
        with self._lock:
            if stamp == self._seen:
                return
            self._seen = stamp
            try:
                keys, plain = _parsed(file.read_text(encoding="utf-8"), "the file")
                self._ring = _checked(keys, None, plain)
            except (OSError, UnicodeDecodeError, InvalidValue) as error:
                log.warning("the encryption keys stay as they were: their file cannot be used: %s", _why(error))

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._ring.ids)}; current {self._ring.current})"


def new_key() -> tuple[str, str]:
    """A new key as text: its id, which starts with the day, and the key in base64."""
    import datetime

    day = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
    return f"k{day}-{os.urandom(2).hex()}", base64.b64encode(os.urandom(KEY_BYTES)).decode()


def _checked(keys: Mapping[str, bytes], current: str | None, plain: bool) -> Ring:
    if not keys:
        raise InvalidValue("a keyring holds at least one key: make one by 'limpet keys new'")
    given: Iterable[tuple[object, object]] = keys.items()
    for key_id, key in given:
        if not isinstance(key_id, str) or not _ID.match(key_id) or key_id == PLAIN:
            raise InvalidValue(
                f"the id of an encryption key is 1 to 32 characters of a-z, 0-9, '_', '.' and '-', and not '{PLAIN}'"
            )
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise InvalidValue(f"encryption key {key_id!r} is not {KEY_BYTES} bytes: make one by 'limpet keys new'")
    first = next(iter(keys)) if current is None else current
    if first not in keys:
        raise InvalidValue(f"the current encryption key {first!r} is not in the keyring")
    return Ring(keys, first, plain)


def _parsed(text: str, name: str) -> tuple[dict[str, bytes], bool]:
    """Keys as they are written: an id, a colon and the key in base64. No message shows any of it."""
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
                f"item {number} of {name} is not an encryption key: write ID:KEY, as 'limpet keys new' prints it"
            )
        if key_id in keys:
            raise InvalidValue(f"{name} has two encryption keys of the id {key_id!r}")
        keys[key_id] = key
    if not keys:
        raise InvalidValue(f"{name} holds no encryption key: make one by 'limpet keys new'")
    return keys, plain


def _stamp(file: Path) -> tuple[int, int, int]:
    """What tells one content of a file from another, without reading it."""
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
