"""Opening a session: the engine of a URL, with encryption in front of it where there are keys."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from limpet.checks import NUMBER_MAX, check_window, check_writer
from limpet.clock import Clock, SystemClock
from limpet.engine import Engine
from limpet.errors import InvalidValue
from limpet.model import Window
from limpet.session import Session
from limpet.urls import KEYS_VARIABLE, Address, open_address

if TYPE_CHECKING:
    from limpet.encryption.keyring import Keyring

__all__ = ["encrypt_engine", "find_keyring", "open_engine", "open_session"]


async def open_engine(url: str, clock: Clock, *, encryption: Keyring | None = None) -> Engine:
    """Open the engine of a URL, with encryption in front of it where there are keys for it."""
    address = Address.parse(url)
    # Find the keys first: a store without its keys is refused before anything is opened.
    keyring = find_keyring(encryption, address.options.get("encryption"))
    if keyring is not None and address.scheme in ("http", "https"):
        raise InvalidValue(
            f"{address}: the server encrypts, so start the server with the keys, and open this URL with "
            "?encryption=off where the environment names keys"
        )
    engine = await open_address(address.without("encryption"), clock)
    return engine if keyring is None else encrypt_engine(engine, keyring, clock)


def find_keyring(given: Keyring | None, option: str | None) -> Keyring | None:
    """Find the keyring of a store: the given one, that of its URL or of the environment; None for no encryption.

    ``option`` is the URL's ``encryption``: ``env:NAME``, ``file:PATH`` or ``off``. Only a store with keys loads the
    encryption package.
    """
    if given is None and (option == "off" or (option is None and not os.environ.get(KEYS_VARIABLE))):
        return None
    from limpet.encryption.keyring import Keyring

    if given is not None:
        if not isinstance(given, Keyring):
            raise InvalidValue(f"encryption takes a limpet.Keyring, not something of type {type(given).__name__}")
        return given
    if option is None:
        return Keyring.from_env(KEYS_VARIABLE)
    kind, _, name = option.partition(":")
    if kind == "env" and name:
        return Keyring.from_env(name)
    if kind == "file" and name:
        return Keyring.from_file(name)
    raise InvalidValue(
        "the option encryption of a URL names where the keys are: env:NAME, file:PATH, or off. "
        "A URL holds no key itself, because URLs are shown, logged and passed on"
    )


def encrypt_engine(engine: Engine, keyring: Keyring, clock: Clock) -> Engine:
    """Put encryption in front of an engine."""
    from limpet.encryption.engine import EncryptedEngine

    return EncryptedEngine(engine, keyring, clock)


async def open_session(
    url: str | None,
    *,
    clock: Clock | None,
    max_value_bytes: int,
    window: Window | None,
    encryption: Keyring | None = None,
    writer: str | None = None,
) -> Session:
    """Open the engine of a URL; ``LIMPET_URL`` or ``./limpet.db`` when none is given."""
    if type(max_value_bytes) is not int or not 1 <= max_value_bytes <= NUMBER_MAX:
        raise InvalidValue("max_value_bytes is an integer from 1 to 2^63-1")
    if clock is not None and not _is_clock(clock):
        raise InvalidValue(f"a clock is a limpet.Clock, not something of type {type(clock).__name__}")
    if window is not None:
        check_window(window)
    if writer is not None:
        check_writer(writer)
    clock = clock or SystemClock()
    chosen = os.environ.get("LIMPET_URL") or "sqlite:///limpet.db" if url is None or url == "" else url
    engine = await open_engine(chosen, clock, encryption=encryption)
    return Session(engine, clock, value_bytes_max=max_value_bytes, window=window, writer=writer)


def _is_clock(clock: object) -> bool:
    """Whether this is a clock, and not a class of clocks."""
    verbs = ("now_ms", "monotonic", "sleep")
    return not isinstance(clock, type) and all(callable(getattr(clock, verb, None)) for verb in verbs)
