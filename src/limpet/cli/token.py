"""``limpet token``: who may use a server over HTTP, and with which rights.

`limpet.server.access` does the work, and is loaded only when one of these commands runs. It works on the store itself,
so the caller must be able to open the store, and no server need run. A secret is printed once, by the command that
makes it, and is stored nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

import limpet
from limpet.cli import output
from limpet.cli.arguments import Setup, duration, pass_setup
from limpet.cli.commands import Group, examples
from limpet.cli.failure import Missing, quote_name
from limpet.cli.grant import GrantCommand
from limpet.errors import NotFound

if TYPE_CHECKING:
    from limpet.server.access import Issued, Token

T = TypeVar("T")

_COLUMNS: Final = {"id": 13, "name": 20, "created": 21, "expires": 21, "opens": 0}


@click.group(
    name="token",
    cls=Group,
    epilog=examples(
        "limpet token create trivia -n trivia --right read,reveal,write,lock",
        "limpet token list",
        "limpet token rotate 5f0c1d2e3a4b --grace 1h",
        "limpet token revoke 5f0c1d2e3a4b",
    ),
)
def token() -> None:
    """Manage who may use a server, and with which rights."""


@token.command(
    cls=GrantCommand,
    epilog=examples(
        "limpet token create trivia -n trivia --right read,reveal,write,lock",
        "limpet token create a -n shared --prefix team-a/ --right read,reveal",
        "limpet token create grafana -n '*' --right read --expires 90d",
    ),
)
@click.argument("name")
@click.option(
    "-n",
    "--namespace",
    "namespaces",
    multiple=True,
    required=True,
    metavar="NAME",
    help="Open this namespace, or '*' for all but the server's own. May be repeated.",
)
@click.option(
    "--prefix",
    "prefixes",
    multiple=True,
    metavar="PREFIX",
    help="Only keys with this prefix. May be repeated. [default: all]",
)
@click.option(
    "--right",
    "rights",
    multiple=True,
    required=True,
    metavar="RIGHT",
    help="One or more, with commas: read (keys, numbers, times), reveal (values), write, lock, admin.",
)
@click.option("--expires", type=duration, metavar="DURATION", help="End it after this long: 12h, 90d. [default: never]")
@pass_setup
def create(
    setup: Setup,
    name: str,
    namespaces: tuple[str, ...],
    prefixes: tuple[str, ...],
    rights: tuple[str, ...],
    expires: float | None,
) -> None:
    """Make a token for NAME, and print it. It cannot be shown again.

    A PREFIX is a string, not a folder: team/a opens team/ab too, and team/a/ does not. No right includes another.
    """
    from limpet.server.access import RIGHTS, Scope, create_token

    root = click.get_current_context().find_root()
    if root.get_parameter_source("namespace") is ParameterSource.COMMANDLINE:
        raise click.UsageError("give --namespace after create, because it may be repeated there")
    wanted = {right for given in rights for right in given.split(",")}
    if wanted - set(RIGHTS):
        raise click.UsageError(f"--right is one or more of {', '.join(RIGHTS)}")
    granted = tuple(right for right in RIGHTS if right in wanted)
    scopes = [Scope(namespace, prefix, granted) for namespace, prefix in product(namespaces, prefixes or ("",))]
    issued = _run(setup, lambda store: create_token(store, name, scopes, expires=expires), make=True)
    _show_issued(setup, issued)


@token.command(name="list", epilog=examples("limpet token list", "limpet token list --json | jq -r .id"))
@pass_setup
def list_(setup: Setup) -> None:
    """List the tokens, without their secrets.

    Each line has id, name, when it was made, when it ends, and what it opens.
    """
    from limpet.server.access import list_tokens

    async def load(store: limpet.Store) -> tuple[dict[str, Token], int]:
        return await list_tokens(store), (await store.status()).now_ms

    found, now_ms = _run(setup, load)
    if found and not setup.as_json:
        output.show_heading(_COLUMNS)
    for id, one in found.items():
        if setup.as_json:
            output.show({**_as_json(id, one), "expired": _is_over(one, now_ms)})
        else:
            end = "never" if one.expires_ms is None else _time(one.expires_ms)
            opens = " ".join(f"{scope.namespace}:{scope.prefix}:{','.join(scope.rights)}" for scope in one.scopes)
            cells = [id, one.name, _time(one.created_ms), "expired" if _is_over(one, now_ms) else end, opens]
            output.show_columns(_COLUMNS, [output.visible(cell) for cell in cells])
    if not found:
        output.show_note(f"there are no tokens in {setup.shown_url}")


@token.command(epilog=examples("limpet token revoke 5f0c1d2e3a4b"))
@click.argument("id")
@pass_setup
def revoke(setup: Setup, id: str) -> None:
    """End the token ID. Every server refuses it within moments, and ends its streams.

    ID may also be a whole token.
    """
    from limpet.server.access import revoke_token

    id = _id_of(id)
    _run(setup, lambda store: revoke_token(store, id), id=id)
    if setup.as_json:
        output.show({"id": id, "revoked": True})


@token.command(epilog=examples("limpet token rotate 5f0c1d2e3a4b", "limpet token rotate 5f0c1d2e3a4b --grace 0"))
@click.argument("id")
@click.option(
    "--grace",
    type=duration,
    default="1h",
    show_default=True,
    metavar="DURATION",
    help="How long the present secret stays valid; 0 if it has leaked.",
)
@click.option("--expires", type=duration, metavar="DURATION", help="A new end, from now. [default: as before]")
@pass_setup
def rotate(setup: Setup, id: str, grace: float, expires: float | None) -> None:
    """Give the token ID a new secret, and print it. It cannot be shown again."""
    from limpet.server.access import rotate_token

    id = _id_of(id)
    issued = _run(setup, lambda store: rotate_token(store, id, grace=grace, expires=expires), id=id)
    _show_issued(setup, issued)


# Inside -----------------------------------------------------------------------


def _run(setup: Setup, work: Callable[[limpet.Store], Awaitable[T]], *, make: bool = False, id: str | None = None) -> T:
    """Run work in the server's own namespace."""
    from limpet.server.dispatch import OWN_NAMESPACE

    setup.check(make=make)

    async def open_and_work() -> T:
        async with limpet.open(setup.url, namespace=OWN_NAMESPACE, sweep=False) as store:
            return await work(store)

    try:
        return asyncio.run(open_and_work())
    except NotFound:
        raise Missing(
            f"there is no token {quote_name(id or '')} in {setup.shown_url}", "'limpet token list' lists the tokens."
        ) from None


def _id_of(text: str) -> str:
    """The id, also of a whole token: its secret must not appear in a message."""
    return text.split("_")[1] if text.startswith("lmp_") else text


def _show_issued(setup: Setup, issued: Issued) -> None:
    if setup.as_json:
        output.show({**_as_json(issued.id, issued.token), "token": issued.secret})
    else:
        output.show_line(issued.secret)
        output.show_note(f"this is token {issued.id}; keep it now, it cannot be shown again")


def _as_json(id: str, one: Token) -> dict[str, Any]:
    former = None if one.former is None else _time(one.former.until_ms)
    return {
        "id": id,
        "name": one.name,
        "scopes": [{"namespace": s.namespace, "prefix": s.prefix, "rights": list(s.rights)} for s in one.scopes],
        "created_at": _time(one.created_ms),
        "expires_at": None if one.expires_ms is None else _time(one.expires_ms),
        "former_until": former,
    }


def _is_over(one: Token, now_ms: int) -> bool:
    return one.expires_ms is not None and now_ms >= one.expires_ms


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
