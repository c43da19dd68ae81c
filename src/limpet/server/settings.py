"""The settings of a server, and where they come from.

An option of the command line overrides a variable of the environment (``LIMPET_SERVE_…``), which overrides a TOML
file, which overrides the default. Limits of namespaces are in the file alone.
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from limpet.errors import InvalidValue
from limpet.keys import check_namespace
from limpet.server.dispatch import OWN_NAMESPACE
from limpet.server.hosts import ADDRESSES
from limpet.server.limits import Limit, NamespaceLimits

if TYPE_CHECKING:
    from nats.aio.client import Client

__all__ = ["CONNECTIONS", "ListenAddress", "Settings", "read_file"]

CONNECTIONS: Final = 1_000
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")


class ListenAddress(msgspec.Struct, frozen=True):
    """The host and the port to listen on. As text, it is as in a URL."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Parse ``host:port``, ``[::1]:port``, or ``:port`` for 127.0.0.1."""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65_535:
            raise InvalidValue(f"{text!r} is not an address to listen on: write HOST:PORT, such as 127.0.0.1:8080")
        return cls(host.strip("[]") or "127.0.0.1", int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that configures a server. The names are the options of ``limpet serve``.

    ``nats`` is a URL, or a connection that its owner closes.
    """

    url: str
    http: ListenAddress | None = None
    nats: str | Client | None = None
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
    limits: NamespaceLimits = NamespaceLimits(Limit(), {})

    def check(self) -> None:
        """Raise `InvalidValue` for settings that contradict each other or are not safe."""
        if self.http is None and self.nats is None:
            raise InvalidValue("this server would have no interface: give --http, --nats, or both")
        if (self.certificate is None) != (self.certificate_key is None):
            raise InvalidValue("TLS takes both --certificate and --certificate-key")
        if self.http is not None and not self.http.is_loopback and self.auth == "none" and not self.insecure:
            raise InvalidValue(
                f"{self.http} can be reached from other machines, which would need no token: "
                "add --auth tokens, or listen on 127.0.0.1, or add --insecure"
            )
        if not _is_subject(self.prefix):
            raise InvalidValue(f"{self.prefix!r} is not the beginning of a subject: words without * and >, and dots")
        if self.cleanup_interval <= 0:
            raise InvalidValue(f"--cleanup-interval is more than 0 seconds, not {self.cleanup_interval:g}")
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
        """The values that the header ``Host`` may have; empty for any. ``ADDRESSES`` stands for every IP address.

        A web page can rebind its own name to any address, and then counts as the same origin; the name in ``Host``
        reveals it. An address cannot be rebound. With tokens, which such a page does not have, names are checked only
        on a loopback address, or when ``--host`` was given.
        """
        assert self.http is not None
        known = [*LOOPBACK_NAMES, self.http.host.lower(), *(name.lower().rstrip(".") for name in self.host)]
        if self.http.is_loopback:
            return known
        if self.auth == "tokens" and not self.host:
            return ()
        return [*known, ADDRESSES]


def _is_subject(prefix: str) -> bool:
    return all(word and not set(word) & set("*> \t\r\n") for word in prefix.split("."))


def read_file(path: Path) -> dict[str, Any]:
    """Read a TOML file. Returns its settings by the names of the options."""
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
