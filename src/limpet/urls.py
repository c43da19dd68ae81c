"""From a URL to an engine: URLs taken apart, and which engine opens which scheme.

Third parties add engines through the entry-point group ``limpet.engines``. Whether values are encrypted is decided
above, in `limpet.opening`.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote

import msgspec

from limpet.clock import Clock
from limpet.engine import Engine, Finding
from limpet.errors import InvalidValue

__all__ = ["KEYS_VARIABLE", "Address", "Examiner", "Opener", "find_examiner", "open_address"]

KEYS_VARIABLE: Final = "LIMPET_ENCRYPTION_KEYS"
"""The environment variable that holds the encryption keys of a process."""


class Address(msgspec.Struct, frozen=True):
    """An engine's URL, taken apart. Its text form never shows a password."""

    url: str
    scheme: str
    path: str
    options: dict[str, str]

    @classmethod
    def parse(cls, url: str) -> Address:
        """Take a URL apart."""
        if not isinstance(url, str):
            raise InvalidValue(
                f"an engine is named by a URL such as 'sqlite:///state.db', not by a {type(url).__name__}"
            )
        if "\0" in url or any("\ud800" <= letter <= "\udfff" for letter in url):
            raise InvalidValue("an engine URL holds no U+0000 and no lone surrogate")
        scheme, colon, rest = url.partition(":")
        if not colon or not scheme:
            raise InvalidValue(
                f"{_without_password(url)!r} is not an engine URL: try 'sqlite:///state.db' or 'memory:'"
            )
        # SQLAlchemy's URLs name a driver behind a plus. Ours is fixed, so the name changes nothing.
        engine, plus, _ = scheme.partition("+")
        if plus and engine.lower() in _WITH_DRIVER:
            return cls.parse(f"{engine}:{rest}")
        # A password may hold a question mark; what follows it up to the last @ is no option.
        credentials, at, place = rest.rpartition("@")
        path, _, query = place.partition("?")
        body = credentials + at + path
        options = dict(parse_qsl(query, keep_blank_values=True))
        return cls(url, scheme.lower(), unquote(body), options)

    def take(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """An option of the URL that must be one of a few words."""
        found = self.options.get(name, default).lower()
        if found not in allowed:
            raise InvalidValue(f"{self}: {name} is one of {', '.join(allowed)}")
        return found

    def allow(self, *names: str) -> None:
        """Refuse options nobody reads: a misspelt one would be silently without effect."""
        for name in self.options:
            if name == "clock" and name not in names:
                raise InvalidValue(f"{self}: the option clock is for redis: and nats: URLs; pass clock= to limpet.open")
            if name not in names:
                raise InvalidValue(f"{self}: unknown option {name!r}, known: {', '.join(names) or 'none'}")

    def without(self, name: str) -> Address:
        """The same address without an option."""
        if name not in self.options:
            return self
        credentials, at, place = self.url.rpartition("@")
        path, _, query = place.partition("?")
        kept = "&".join(each for each in query.split("&") if each.partition("=")[0] != name)
        return Address.parse(f"{credentials}{at}{path}{'?' if kept else ''}{kept}")

    def __str__(self) -> str:
        return _without_password(self.url)

    __repr__ = __str__


def _without_password(url: str) -> str:
    """The URL as it may be shown: no credentials and no option's value, however it was misspelt."""
    scheme, colon, rest = url.partition(":")
    credentials, at, place = rest.rpartition("@")
    place = (place if at else credentials + place).partition("?")[0]
    return f"{scheme}{colon}{'//***@' if at else ''}{place}"


Opener = Callable[[Address, Clock], Awaitable[Engine]]
Examiner = Callable[[Path], Iterator[Finding]]

_BUILT_IN: Final = {
    "memory": "limpet.engines.memory",
    "sqlite": "limpet.engines.sqlite.engine",
    "postgresql": "limpet.engines.postgres.engine",
    "redis": "limpet.engines.redis.engine",
    "nats": "limpet.engines.nats.engine",
    "http": "limpet.engines.http",
}
_EXAMINERS: Final = {"sqlite": "limpet.engines.sqlite.examine"}
_WITH_DRIVER: Final = ("sqlite", "postgresql", "postgres")
_ALSO: Final = {"postgres": "postgresql", "rediss": "redis", "tls": "nats", "https": "http"}


async def open_address(address: Address, clock: Clock) -> Engine:
    """Open the engine of an address. Third parties join through the entry-point group ``limpet.engines``."""
    scheme = _ALSO.get(address.scheme, address.scheme)
    if scheme in _BUILT_IN:
        try:
            opener: Opener = importlib.import_module(_BUILT_IN[scheme]).open
        except ModuleNotFoundError as missing:
            extra = _BUILT_IN[scheme].split(".")[2]
            raise InvalidValue(
                f"the engine of {scheme}: URLs needs {missing.name}: pip install 'limpet[{extra}]'"
            ) from missing
        try:
            return await opener(address, clock)
        except (ValueError, OverflowError):
            # Not what it says: it may quote a part of a password.
            raise InvalidValue(f"{address}: this URL cannot be read, look at its host, port and path") from None
    # Only a scheme that is not built in pays for looking at what is installed.
    import difflib
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group="limpet.engines")}
    if address.scheme in found:
        opener = found[address.scheme].load()
        return await opener(address, clock)
    known = sorted({*_BUILT_IN, *found})
    guess = difflib.get_close_matches(address.scheme, known, n=1)
    hint = f"did you mean {guess[0]!r}? " if guess else ""
    raise InvalidValue(f"unknown engine {address.scheme!r}: {hint}known: {', '.join(known)}")


def find_examiner(address: Address) -> Examiner | None:
    """The checks of an engine's file that need no open store; None for an engine that has none."""
    module = _EXAMINERS.get(_ALSO.get(address.scheme, address.scheme))
    if module is None:
        return None
    examiner: Examiner = importlib.import_module(module).examine
    return examiner
