"""The server over streamable HTTP: the same checks at the edge, and the same tokens, as ``limpet serve``."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
from mcp.server import Server
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from limpet.errors import InvalidValue
from limpet.mcp.server import CALLER
from limpet.server.dispatch import Caller, Callers, TrustedCaller
from limpet.server.http import BODIES_BYTES_MAX, BODY_BYTES_MAX, EdgeMiddleware, authenticate
from limpet.server.settings import ListenAddress, Settings

__all__ = ["PATH", "Anyone", "make_app", "serve_http"]

PATH: Final = "/mcp"
GRACE_S: Final = 2


class Anyone:
    """Every caller that reaches this server may use it."""

    async def caller_of(self, token: str | None, client: str | None) -> Caller:
        """The same for all: with all rights but ``admin``."""
        return TrustedCaller("mcp")


class _Authentication:
    """Finds the caller of a request by its token, and binds the sessions of the SDK to it."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = await authenticate(Request(scope), self._callers)
            scope[CALLER] = caller
            scope["user"] = AuthenticatedUser(AccessToken(token="", client_id=caller.name, scopes=[]))
        await self._app(scope, receive, send)


def make_app(server: Server[Any], callers: Callers, settings: Settings) -> ASGIApp:
    """The application: the edge checks Host and origin, then the token is checked, then the SDK serves."""
    # The edge has checked Host and origin by the rules of `limpet serve`.
    unchecked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(streamable_http_path=PATH, transport_security=unchecked)
    return EdgeMiddleware(
        _Authentication(app, callers),
        body_bytes_max=BODY_BYTES_MAX,
        bodies_bytes_max=BODIES_BYTES_MAX,
        hosts=settings.hosts,
    )


async def serve_http(server: Server[Any], callers: Callers, settings: Settings, started: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. ``started`` gets the URL."""
    assert settings.http is not None
    config = uvicorn.Config(
        make_app(server, callers, settings),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=settings.connections,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.certificate_key,
    )
    runner = uvicorn.Server(config)
    with _listen(settings.http) as listening:
        scheme = "https" if settings.certificate else "http"
        url = f"{scheme}://{ListenAddress(settings.http.host, listening.getsockname()[1])}{PATH}"
        serving = asyncio.ensure_future(runner.serve(sockets=[listening]))
        while not runner.started and not serving.done():  # noqa: ASYNC110 - uvicorn sets no event
            await asyncio.sleep(0.01)
        if runner.started:
            started(url)
        await serving


@contextlib.contextmanager
def _listen(address: ListenAddress) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address.host, address.port))
        except OSError as error:
            raise InvalidValue(f"cannot listen at {address}: {error.strerror}") from error
        yield listening
