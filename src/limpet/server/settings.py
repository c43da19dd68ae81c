"""The settings of a server, and where they come from.

An option of the command line counts before a variable of the environment (``LIMPET_SERVE_…``), that before a TOML
file, and that before what is usual. Limits of namespaces stand in the file alone.
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from limpet.errors import InvalidValue
from limpet.keys import check_namespace
from limpet.server.dispatch import OWN_NAMESPACE
from limpet.server.hosts import ADDRESSES
from limpet.server.limits import Limit, Limits

__all__ = ["CONNECTIONS", "Place", "Settings", "read_file"]

CONNECTIONS: Final = 1_000
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")


class Place(msgspec.Struct, frozen=True):
    """Where to listen."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Place:
        """``host:port``, ``[::1]:port`` or ``:port``, which is this machine alone."""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65_535:
            raise InvalidValue(f"{text!r} is no place to listen at: write HOST:PORT, such as 127.0.0.1:8080")
        return cls(host.strip("[]") or "127.0.0.1", int(port))

    @property
    def is_here(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def shown(self) -> str:
        """As it stands in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a server is told."""

    url: str
    http: Place | None = None
    nats: str | None = None
    nats_credentials: str | None = None
    prefix: str = "db.kv"
    auth: Literal["none", "tokens"] = "none"
    insecure: bool = False
    read_only: bool = False
    host: Sequence[str] = ()
    connections: int = CONNECTIONS
    certificate: str | None = None
    certificate_key: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_form: Literal["plain", "json"] = "plain"
    metric_names: Literal["limpet", "rosey", "both"] = "limpet"
    cleanup_interval: float = 300.0
    audit: Sequence[str] = ()
    limits: Limits = Limits(Limit(), {})

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if self.http is None and self.nats is None:
            raise InvalidValue("nobody could reach this server: give --http, --nats, or both")
        if (self.certificate is None) != (self.certificate_key is None):
            raise InvalidValue("TLS takes both --certificate and --certificate-key")
        if self.http is not None and not self.http.is_here and self.auth == "none" and not self.insecure:
            raise InvalidValue(
                f"{self.http.shown} can be reached from other machines, and nobody would be asked who they are: "
                "add --auth tokens, or listen on 127.0.0.1, or say --insecure"
            )
        if not _is_subject(self.prefix):
            raise InvalidValue(f"{self.prefix!r} is not the beginning of a subject: words without * and >, and dots")
        if self.cleanup_interval <= 0:
            raise InvalidValue("a cleanup interval is above zero seconds")
        if self.connections < 1:
            raise InvalidValue(f"--connections is 1 or more, not {self.connections}")
        for name in self.host:
            if not name or set(name) & set("/:@ \t\r\n"):
                raise InvalidValue(f"{name!r} is not a host name: give --host a name without a scheme and a port")
        for namespace in self.audit:
            if check_namespace(namespace) == OWN_NAMESPACE:
                raise InvalidValue(f"namespace {namespace!r} is the server's own, and has no semantic entries")

    @property
    def hosts(self) -> Sequence[str]:
        """The names that ``Host`` may have; any if there is none. ``ADDRESSES`` among them stands for every address.

        A web page can rebind its own name to any address, and is of the same origin then: the name it uses gives it
        away. An address cannot be rebound. Where every caller needs a token, which a page does not have, names are
        checked on this machine, or when some were given.
        """
        assert self.http is not None
        known = [*LOOPBACK_NAMES, self.http.host.lower(), *(name.lower().rstrip(".") for name in self.host)]
        if self.http.is_here:
            return known
        if self.auth == "tokens" and not self.host:
            return ()
        return [*known, ADDRESSES]


def _is_subject(prefix: str) -> bool:
    return all(word and not set(word) & set("*> \t\r\n") for word in prefix.split("."))


def read_file(path: Path) -> dict[str, Any]:
    """What a TOML file says, by the names of the options."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror if isinstance(error, OSError) else error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidValue(f"{path} is not TOML: {error}") from None
    members = {name.replace("-", "_"): value for name, value in found.items()}
    known = {*Settings.__struct_fields__}
    for name in members:
        if name not in known:
            raise InvalidValue(f"{path}: unknown setting {name!r}, known: {', '.join(sorted(known))}")
    for name, held in (("audit", "namespaces"), ("host", "names")):
        if not isinstance(members.get(name, []), list):
            raise InvalidValue(f"{path}: {name} is a list of {held}")
    return members
