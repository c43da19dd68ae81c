"""`limpet grant`: prints the statements of `limpet.isolation` for a role, or runs them as an administrator."""

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

_DRIVER_OPTIONS: Final = ("sslmode", "sslrootcert", "sslcert", "sslkey", "host", "application_name")


class GrantCommand(Command):
    """A command that takes any number of namespaces; others take one."""

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

    Prints a script for psql, or a command for redis-cli, without connecting. The role is created if it does not exist.
    A grant replaces all earlier grants of the same role. LIMPET_NAMESPACE is ignored.

    With --nats, prints a block for nats-server: the permissions of each plugin and of the Limpet server.
    """
    from limpet.isolation import nats, postgres, redis

    if on_nats:
        if namespaces or read_only or login or revoke or apply:
            raise click.UsageError("--nats prints permissions of plugins: give only --prefix and --server with it")
        block = nats.grant_config(roles, prefix=prefix, server=server)
        if setup.as_json:
            output.show({"plugins": sorted({*roles}), "server": server, "prefix": prefix, "configuration": block})
        else:
            output.write(block.encode())
        return
    if len(roles) > 1:
        raise click.UsageError("give one ROLE: only --nats takes several")
    (role,) = roles
    if revoke and (namespaces or read_only or login):
        raise click.UsageError("--revoke takes everything back: give no --namespace, --read-only or --login with it")
    root = click.get_current_context().find_root()
    if root.get_parameter_source("namespace") is ParameterSource.COMMANDLINE:
        # It would have no effect, and the grant would be wider than its caller meant.
        raise click.UsageError("give --namespace after grant, where it may be repeated")
    address = Address.parse(setup.url)
    options: dict[str, Any] = {"namespaces": namespaces, "read_only": read_only, "login": login}
    access = "none" if revoke else "read" if read_only else "write"
    report: dict[str, Any] = {
        "role": role,
        "namespaces": sorted(set(namespaces)) or None,
        "access": access,
        "applied": apply,
    }
    if address.scheme in ("redis", "rediss"):
        words = redis.revoke_acl(role) if revoke else redis.grant_acl(role, hash_tag=_has_hash_tag(address), **options)
        script = redis.command_text(words)
        report["acl"] = script
    elif address.scheme in ("postgresql", "postgres"):
        schema = address.options.get("schema", "public")
        script = (
            postgres.revoke_sql(role, schema=schema) if revoke else postgres.grant_sql(role, schema=schema, **options)
        )
        report |= {"schema": schema, "sql": script}
    else:
        raise InvalidValue(f"{address}{setup.why} has no roles: only a postgresql: or redis: store can be granted")
    if apply:
        if not revoke:
            # The role itself may not create the tables or the store id, so they are created before.
            setup.open(make=True).close()
        asyncio.run(_run_acl(address, words) if "acl" in report else _run_script(address, script))
    if setup.as_json:
        output.show(report)
    elif not apply:
        output.write(script.encode())


def _has_hash_tag(address: Address) -> bool:
    return address.options.get("hash_tag", "namespace") == "namespace"


async def _run_acl(address: Address, words: list[str]) -> None:
    """Send the command to the server."""
    try:
        from redis import exceptions
        from redis.asyncio import Redis
    except ModuleNotFoundError as missing:
        raise InvalidValue("redis: URLs need redis: pip install 'limpet[redis]'") from missing

    try:
        async with Redis.from_url(address.url.partition("?")[0], socket_connect_timeout=CONNECT_S) as client:
            await client.execute_command(*words)  # type: ignore[no-untyped-call]
    except exceptions.NoPermissionError as error:
        raise PermissionDenied(f"{address}: {error}. Grants need a user that may run ACL SETUSER") from error
    except exceptions.ResponseError as error:
        raise InvalidValue(f"{address}: {error}") from error
    except (exceptions.RedisError, OSError) as error:
        raise Unavailable(f"{address} cannot be reached now: {type(error).__name__}") from error


async def _run_script(address: Address, script: str) -> None:
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
        raise _translate(error, address) from error


def _data_source(address: Address) -> str:
    """The URL with only those options that the driver reads."""
    target = address.url.rpartition("@")[2]
    body = address.url[: -len(target)] + target.partition("?")[0]
    options = {name: value for name, value in parse_qsl(target.partition("?")[2]) if name in _DRIVER_OPTIONS}
    return f"{body}?{urlencode(options)}" if options else body


def _translate(error: Exception, address: Address) -> LimpetError:
    state = getattr(error, "sqlstate", None) or ""
    if state == "42501" or state[:2] == "28":
        return PermissionDenied(f"{address}: {error}. Grants need the owner of the tables, or a superuser")
    if state == "55P03":
        return Unavailable(
            f"{address}: the tables were locked for five seconds and nothing was granted: try again later"
        )
    if state and state[:2] not in ("08", "53", "57", "40"):
        return InvalidValue(f"{address}: {error}")
    return Unavailable(f"{address} cannot be reached now: {type(error).__name__}")
