"""From a URL to an engine: parsing URLs, and choosing the engine of a scheme.

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
    """A parsed engine URL. Its text form never shows a password."""

    url: str
    scheme: str
    path: str
    options: dict[str, str]

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL."""
        if not isinstance(url, str):
            raise InvalidValue(
                f"an engine is named by a URL such as 'sqlite:///state.db', not by a {type(url).__name__}"
            )
        if "\0" in url or any("\ud800" <= letter <= "\udfff" for letter in url):
            raise InvalidValue("an engine URL holds no U+0000 and no lone surrogate")
        scheme, colon, rest = url.partition(":")
        if not colon or not scheme:
            raise InvalidValue(
                f"{_hide_credentials(url)!r} is not an engine URL: try 'sqlite:///state.db' or 'memory:'"
            )
        # SQLAlchemy's URLs name a driver after a plus. Our driver is fixed, so the name is ignored.
        engine, plus, _ = scheme.partition("+")
        if plus and engine.lower() in _WITH_DRIVER:
            return cls.parse(f"{engine}:{rest}")
        # A password may hold a question mark; the text after it, up to the last @, is not an option.
        credentials, at, target = rest.rpartition("@")
        path, _, query = target.partition("?")
        body = credentials + at + path
        options = dict(parse_qsl(query, keep_blank_values=True))
        return cls(url, scheme.lower(), unquote(body), options)

    def take(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """Read an option of the URL that must be one of a few words."""
        found = self.options.get(name, default).lower()
        if found not in allowed:
            raise InvalidValue(f"{self}: {name} is one of {', '.join(allowed)}")
        return found

    def allow(self, *names: str) -> None:
        """Refuse options that the engine does not read: a misspelt one would silently have no effect."""
        for name in self.options:
            if name == "clock" and name not in names:
                raise InvalidValue(f"{self}: the option clock is for redis: and nats: URLs; pass clock= to limpet.open")
            if name not in names:
                raise InvalidValue(f"{self}: unknown option {name!r}, known: {', '.join(names) or 'none'}")

    def without(self, name: str) -> Address:
        """Copy the address without an option."""
        if name not in self.options:
            return self
        credentials, at, target = self.url.rpartition("@")
        path, _, query = target.partition("?")
        kept = "&".join(each for each in query.split("&") if each.partition("=")[0] != name)
        return Address.parse(f"{credentials}{at}{path}{'?' if kept else ''}{kept}")

    def __str__(self) -> str:
        return _hide_credentials(self.url)

    __repr__ = __str__


def _hide_credentials(url: str) -> str:
    """Format a URL for messages: no credentials and no option, however the URL was misspelt."""
    scheme, colon, rest = url.partition(":")
    credentials, at, target = rest.rpartition("@")
    target = (target if at else credentials + target).partition("?")[0]
    return f"{scheme}{colon}{'//***@' if at else ''}{target}"


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
_IN_TESTS: Final = {"chaos": "limpet.testing.chaos"}
"""Schemes that stand in front of another URL, in tests."""

_EXAMINERS: Final = {"sqlite": "limpet.engines.sqlite.examine"}
_WITH_DRIVER: Final = ("sqlite", "postgresql", "postgres")
_ALIASES: Final = {"postgres": "postgresql", "rediss": "redis", "tls": "nats", "https": "http"}


async def open_address(address: Address, clock: Clock) -> Engine:
    """Open the engine of an address. Third parties join through the entry-point group ``limpet.engines``."""
    scheme = _ALIASES.get(address.scheme, address.scheme)
    module = _BUILT_IN.get(scheme) or _IN_TESTS.get(scheme)
    if module is not None:
        try:
            opener: Opener = importlib.import_module(module).open
        except ModuleNotFoundError as missing:
            extra = module.split(".")[2]
            raise InvalidValue(
                f"the engine of {scheme}: URLs needs {missing.name}: pip install 'limpet[{extra}]'"
            ) from missing
        try:
            return await opener(address, clock)
        except (ValueError, OverflowError):
            # Leave the original message out: it may quote a part of a password.
            raise InvalidValue(f"{address}: this URL cannot be read, check its host, port and path") from None
    # Only a scheme that is not built in pays for searching the installed packages.
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
    module = _EXAMINERS.get(_ALIASES.get(address.scheme, address.scheme))
    if module is None:
        return None
    examiner: Examiner = importlib.import_module(module).examine
    return examiner
