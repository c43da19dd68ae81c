"""``limpet mcp``: agents share the store by the Model Context Protocol, over standard input and output or over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

import limpet
from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Command, examples
from limpet.errors import InvalidValue

if TYPE_CHECKING:
    from limpet.server.dispatch import Callers
    from limpet.server.settings import Settings


@click.command(
    name="mcp",
    cls=Command,
    epilog=examples(
        "limpet mcp --url sqlite:///agents.db   # the client that starts it",
        "limpet mcp -n team --reveal no --read-only",
        "limpet mcp --http 127.0.0.1:8090       # many clients, at /mcp",
        "limpet mcp --http 0.0.0.0:8090 --auth tokens",
    ),
)
@click.option("--token", metavar="TOKEN", help="The token for a store at http:// or https://. [env: LIMPET_TOKEN]")
@click.option("--http", metavar="HOST:PORT", help="Serve many clients over HTTP there, instead of one over stdio.")
@click.option(
    "--auth",
    type=click.Choice(["none", "tokens"]),
    default="none",
    show_default=True,
    help="Whether HTTP requires a token ('limpet token create').",
)
@click.option("--insecure", is_flag=True, help="Serve other machines without authentication.")
@click.option("--host", multiple=True, metavar="NAME", help="A name to accept in Host. May be repeated.")
@click.option("--certificate", metavar="FILE", help="Serve HTTPS with this certificate.")
@click.option("--certificate-key", metavar="FILE", help="The key of the certificate.")
@click.option("--read-only", is_flag=True, help="Offer no tool that writes.")
@click.option(
    "--reveal",
    type=click.Choice(["yes", "no"]),
    default="yes",
    show_default=True,
    help="Whether agents may see values. Without, they see keys, revisions and times.",
)
@pass_setup
def mcp_command(setup: Setup, /, **given: Any) -> None:
    """Serve the store to agents, by the Model Context Protocol.

    A client such as an editor or an agent starts this command and speaks to it over standard input and output. With
    --http one process serves many clients.
    """
    try:
        from limpet.mcp.server import make_server  # noqa: F401 - only whether it is there
    except ModuleNotFoundError as missing:
        raise InvalidValue(f"an MCP server needs {missing.name}: pip install 'limpet[mcp]'") from missing
    if given["http"] is None:
        # A thread waits for input, and nothing but input would end it. What was acknowledged is stored, so that the
        # process may end at once, as it does on SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(_serve(setup, **given))


async def _serve(
    setup: Setup, *, token: str | None, http: str | None, read_only: bool, reveal: str, **given: Any
) -> None:
    from limpet.mcp.server import make_server, serve_stdio

    settings = _settings(setup, http, **given)
    async with limpet.open(_with_token(setup.url, token), namespace=setup.namespace) as store:
        # Fail here and not in the first answer to a model, which could do nothing about it.
        await store.status()
        server = make_server(store, reveals=reveal == "yes", read_only=read_only)
        if settings is None:
            # For the log of the client, or for a person who has started this by hand.
            output.show_stderr(f"limpet: serving {_place(setup)} to the MCP client on standard input")
            await serve_stdio(server)
        else:
            await _serve_http(setup, server, store, settings)


def _settings(setup: Setup, http: str | None, **given: Any) -> Settings | None:
    """The settings of HTTP, checked; None for stdio."""
    if http is None:
        if given["auth"] != "none":
            raise InvalidValue("--auth tokens is for --http: over stdio the client has started this process itself")
        return None
    from limpet.server.settings import ListenAddress, Settings

    settings = Settings(url=setup.url, http=ListenAddress.parse(http), **given)
    settings.check()
    return settings


def _with_token(url: str, token: str | None) -> str:
    if token is None:
        return url
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in ("http", "https"):
        raise InvalidValue("--token is for a store at http:// or https://: other engines take no token")
    return f"{scheme}://{quote(token, safe='')}@{rest.rpartition('@')[2]}"


def _place(setup: Setup) -> str:
    """The namespace and the store. A file with its whole path: a client starts this command in a folder of its own."""
    store = setup.shown_url if setup.file is None else setup.file.absolute()
    return f"namespace {setup.namespace!r} of {store}"


async def _serve_http(setup: Setup, server: Any, store: limpet.Store, settings: Settings) -> None:
    from limpet.mcp.http import Anyone, serve_http

    def show(url: str) -> None:
        output.show_stderr(f"limpet: serving {_place(setup)} to MCP clients at {url}")

    async with contextlib.AsyncExitStack() as parts:
        callers: Callers = Anyone()
        if settings.auth == "tokens":
            from limpet.server.access import Tokens

            callers = tokens = Tokens(store._session)
            await tokens.start()
            parts.push_async_callback(tokens.close)
        await serve_http(server, callers, settings, show)
