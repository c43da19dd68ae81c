"""`limpet grant` and `limpet revoke`: prints the statements of `limpet.isolation`, or runs them as an administrator."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

import click
from click.core import ParameterSource

from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Command, examples
from limpet.errors import InvalidValue, LimpetError, PermissionDenied, Unavailable
from limpet.urls import Address

CONNECT_S: Final = 10.0

_DRIVERS_OWN: Final = ("sslmode", "sslrootcert", "sslcert", "sslkey", "host", "application_name")


class GrantCommand(Command):
    """A command that takes any number of namespaces, where others take one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (shared,) = (option for option in self.shared if option.name == "namespace")
        self.shared.remove(shared)
        self.params.remove(shared)


@click.command(
    name="grant",
    cls=GrantCommand,
    epilog=examples(
        "limpet grant trivia --url 'postgresql://db/app?schema=trivia'",
        "limpet grant trivia --login --apply",
        "limpet grant bot -n games -n scores > grants.sql",
        "limpet grant grafana --read-only --apply",
        "limpet grant trivia --revoke --apply",
        "limpet grant trivia -n trivia --url redis://cache:6379/0",
        "limpet grant --nats trivia quote-db > plugins.conf",
    ),
)
@click.argument("roles", metavar="ROLE...", nargs=-1, required=True)
@click.option(
    "-n",
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="NAME",
    help="Only this namespace. May be repeated. [default: all of the schema]",
)
@click.option("--read-only", is_flag=True, help="Only reading, for operators and dashboards.")
@click.option("--login", is_flag=True, help="Let ROLE log in. It gets no password here.")
@click.option("--revoke", is_flag=True, help="Take back everything that was granted. ROLE stays.")
@click.option("--apply", is_flag=True, help="Run the script, as the user of the URL. [default: print it]")
@click.option("--nats", "on_nats", is_flag=True, help="Users of NATS instead, one for each plugin ROLE.")
@click.option("--prefix", default="db.kv", metavar="WORDS", help="With --nats: how subjects start. [default: db.kv]")
@click.option("--server", default="limpet", metavar="NAME", help="With --nats: the server's user. [default: limpet]")
@pass_setup
def grant_command(
    setup: Setup,
    roles: tuple[str, ...],
    namespaces: tuple[str, ...],
    read_only: bool,
    login: bool,
    revoke: bool,
    apply: bool,
    on_nats: bool,
    prefix: str,
    server: str,
) -> None:
    """Let ROLE use this store alone: on PostgreSQL, Redis, NATS.

    Prints a script for psql, or a command for redis-cli, without connecting. The role is made if there is none. What it
    may do is what the last grant says, and nothing that an earlier one did. LIMPET_NAMESPACE is not looked at.

    With --nats, prints a block for nats-server: the permissions of each plugin, and of the server that they ask.
    """
    from limpet.isolation import nats as nats_acl
    from limpet.isolation import postgres as grants
    from limpet.isolation import redis as acl

    if on_nats:
        if namespaces or read_only or login or revoke or apply:
            raise click.UsageError("--nats prints permissions of plugins: it goes with --prefix and --server alone")
        block = nats_acl.granting(roles, prefix=prefix, server=server)
        if setup.as_json:
            output.show({"plugins": sorted({*roles}), "server": server, "prefix": prefix, "configuration": block})
        else:
            output.write(block.encode())
        return
    if len(roles) > 1:
        raise click.UsageError("a grant is for one ROLE: only --nats takes several")
    (role,) = roles
    if revoke and (namespaces or read_only or login):
        raise click.UsageError("--revoke takes everything back: give no --namespace, --read-only or --login with it")
    root = click.get_current_context().find_root()
    if root.get_parameter_source("namespace") is ParameterSource.COMMANDLINE:
        # It would be without effect, and the grant wider than somebody believed.
        raise click.UsageError("--namespace stands behind grant, because it may be repeated there")
    address = Address.parse(setup.url)
    how: dict[str, Any] = {"namespaces": namespaces, "read_only": read_only, "login": login}
    access = "none" if revoke else "read" if read_only else "write"
    told = {"role": role, "namespaces": sorted(set(namespaces)) or None, "access": access, "applied": apply}
    if address.scheme in ("redis", "rediss"):
        words = acl.revoking(role) if revoke else acl.granting(role, hash_tag=_has_hash_tag(address), **how)
        script = acl.shown(words)
        told["acl"] = script
    elif address.scheme in ("postgresql", "postgres"):
        schema = address.options.get("schema", "public")
        script = grants.revoking(role, schema=schema) if revoke else grants.granting(role, schema=schema, **how)
        told |= {"schema": schema, "sql": script}
    else:
        raise InvalidValue(f"{address}{setup.why} has no roles: only a postgresql: or redis: store can be granted")
    if apply:
        if not revoke:
            # The role will not be able to make the tables, or name the store, so that is done before.
            setup.open(make=True).close()
        asyncio.run(_apply_acl(address, words) if "acl" in told else _apply(address, script))
    if setup.as_json:
        output.show(told)
    elif not apply:
        output.write(script.encode())


def _has_hash_tag(address: Address) -> bool:
    return address.options.get("hash_tag", "namespace") == "namespace"


async def _apply_acl(address: Address, words: list[str]) -> None:
    """Say the command to the server."""
    try:
        from redis import exceptions
        from redis.asyncio import Redis
    except ModuleNotFoundError as missing:
        raise InvalidValue("redis: URLs need redis: pip install 'limpet[redis]'") from missing

    try:
        async with Redis.from_url(address.url.partition("?")[0], socket_connect_timeout=CONNECT_S) as client:
            await client.execute_command(*words)  # type: ignore[no-untyped-call]
    except exceptions.NoPermissionError as error:
        raise PermissionDenied(f"{address}: {error}. Grants need a user who may say ACL SETUSER") from error
    except exceptions.ResponseError as error:
        raise InvalidValue(f"{address}: {error}") from error
    except (exceptions.RedisError, OSError) as error:
        raise Unavailable(f"{address} cannot be reached now: {type(error).__name__}") from error


async def _apply(address: Address, script: str) -> None:
    """Run the script, which is one transaction."""
    try:
        import asyncpg
    except ModuleNotFoundError as missing:
        raise InvalidValue("postgresql: URLs need asyncpg: pip install 'limpet[postgres]'") from missing

    try:
        connection = await asyncpg.connect(_data_source(address), timeout=CONNECT_S)
        try:
            await connection.execute(script)
        finally:
            await connection.close(timeout=CONNECT_S)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
        raise _translated(error, address) from error


def _data_source(address: Address) -> str:
    """The URL without the options that only the engine knows."""
    place = address.url.rpartition("@")[2]
    body = address.url[: -len(place)] + place.partition("?")[0]
    options = {name: value for name, value in parse_qsl(place.partition("?")[2]) if name in _DRIVERS_OWN}
    return f"{body}?{urlencode(options)}" if options else body


def _translated(error: Exception, address: Address) -> LimpetError:
    state = getattr(error, "sqlstate", None) or ""
    if state == "42501" or state[:2] == "28":
        return PermissionDenied(f"{address}: {error}. Grants need the owner of the tables, or a superuser")
    if state == "55P03":
        return Unavailable(f"{address}: somebody has held the tables for five seconds, and nothing was granted")
    if state and state[:2] not in ("08", "53", "57", "40"):
        return InvalidValue(f"{address}: {error}")
    return Unavailable(f"{address} cannot be reached now: {type(error).__name__}")
