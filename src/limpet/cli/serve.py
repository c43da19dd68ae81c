"""``limpet serve``: collects the settings, and runs a server until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Command, examples
from limpet.errors import InvalidValue

if TYPE_CHECKING:
    from limpet.server.service import Service
    from limpet.server.settings import Settings

OBJECTS_COLLECTED: Final = 10_000
"""How many new objects there may be before the collector looks at them. Requests of 64 callers have about half as many,
and most are gone by then."""


def _read_file(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Use the settings of the file as defaults of the options."""
    if path is not None:
        from limpet.server.settings import read_file

        context.default_map = read_file(path)
    return path


@click.command(
    name="serve",
    cls=Command,
    context_settings={"auto_envvar_prefix": "LIMPET_SERVE"},
    epilog=examples(
        "limpet serve                                # HTTP on 127.0.0.1:8080",
        "limpet serve --nats nats://127.0.0.1:4222   # plugins over NATS",
        "limpet serve --http 127.0.0.1:9000 --auth tokens",
        "limpet serve --config limpet.toml",
    ),
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_read_file,
    help="A TOML file with these options, and with limits.",
)
@click.option("--http", metavar="HOST:PORT", help="Serve HTTP there. [default: 127.0.0.1:8080, unless --nats is given]")
@click.option("--nats", metavar="URL", help="Serve plugins over this NATS server.")
@click.option("--nats-credentials", metavar="FILE", help="The credentials for NATS.")
@click.option("--prefix", default="db.kv", show_default=True, metavar="SUBJECT", help="The first part of all subjects.")
@click.option(
    "--auth",
    type=click.Choice(["none", "tokens"]),
    default="none",
    show_default=True,
    help="Whether HTTP requires a token ('limpet token create').",
)
@click.option("--insecure", is_flag=True, help="Serve other machines without authentication.")
@click.option(
    "--host",
    multiple=True,
    metavar="NAME",
    help="A name to accept in Host, besides those of this machine. May be repeated.",
)
@click.option(
    "--connections",
    type=int,
    default=1000,
    show_default=True,
    metavar="COUNT",
    help="How many HTTP connections may be open at once.",
)
@click.option("--read-only", is_flag=True, help="Refuse all writes.")
@click.option("--certificate", metavar="FILE", help="Serve HTTPS with this certificate.")
@click.option("--certificate-key", metavar="FILE", help="The key of the certificate.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The least level to log; debug logs every operation.",
)
@click.option(
    "--log-form",
    type=click.Choice(["plain", "json"]),
    default="plain",
    show_default=True,
    help="The form of a log line: text for people, or JSON for programs.",
)
@click.option(
    "--metric-names",
    type=click.Choice(["limpet", "rosey", "both"]),
    default="limpet",
    show_default=True,
    help="The names of metrics: limpet_*, rosey_kv_*, or both.",
)
@click.option(
    "--cleanup-interval",
    type=float,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How often the log summarises what has expired.",
)
@click.option(
    "--audit",
    multiple=True,
    metavar="NAMESPACE",
    help="Keep an audit trail of this namespace, with the keys of LIMPET_AUDIT_KEYS. May be repeated.",
)
@pass_setup
def serve_command(setup: Setup, /, **given: Any) -> None:
    """Serve the store to other processes, over HTTP and over NATS.

    Every option can also be set by a variable: LIMPET_SERVE_HTTP, LIMPET_SERVE_AUTH … Ctrl-C or SIGTERM ends it.
    """
    try:
        from limpet.server import logs
        from limpet.server.service import serve
    except ModuleNotFoundError as missing:
        raise InvalidValue(f"a server needs {missing.name}: pip install 'limpet[server,nats]'") from missing
    settings = _settings(setup, given)
    logs.configure(level=settings.log_level, form=settings.log_form)
    with asyncio.Runner(loop_factory=_faster_loop()) as runner:
        runner.run(serve(settings, _begin))


def _faster_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, which costs half as much, where it is installed; None for the loop of Python."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _settings(setup: Setup, given: dict[str, Any]) -> Settings:
    from limpet.server.limits import limits_of
    from limpet.server.settings import ListenAddress, Settings

    file = click.get_current_context().default_map or {}
    if setup.is_default and isinstance(file.get("url"), str):
        setup.choose("url", file["url"])
    http = given.pop("http") or (None if given["nats"] else "127.0.0.1:8080")
    return Settings(
        url=setup.url,
        http=None if http is None else ListenAddress.parse(http),
        limits=limits_of(_table(file, "limits")),
        **given,
    )


def _table(file: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = file.get(name, {})
    if not isinstance(found, Mapping):
        raise InvalidValue(f"{name} must be a table of the file")
    return found


def _begin(service: Service) -> None:
    _collect_less()
    _show_addresses(service)


def _collect_less() -> None:
    """Leave the modules to themselves, and collect garbage when there is more of it: a tenth of the time of a request.

    This process is the server's own. A server inside another program leaves the settings of that program alone.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_COLLECTED, 20, 20)


def _show_addresses(service: Service) -> None:
    for name, address in service.addresses.items():
        output.show_stderr(f"limpet: serving {name} at {address}")
