"""``limpet migrate``: show the schema revision of a store, and bring the schema to another one.

`limpet.schema.migrate` does the work, with Alembic. It is loaded only when one of these commands runs, and raises what
to install where Alembic is missing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Group, examples
from limpet.cli.failure import Missing
from limpet.errors import InvalidValue
from limpet.schema import REVISION, describe_taken, is_behind
from limpet.urls import Address

if TYPE_CHECKING:
    from limpet.schema.migrate import SchemaTarget

_ENGINES: Final = {"sqlite": "sqlite", "postgresql": "postgres", "postgres": "postgres"}


@click.group(
    name="migrate",
    cls=Group,
    epilog=examples(
        "limpet migrate status",
        "limpet migrate up",
        "limpet migrate sql > up.sql    # for an administrator to run",
    ),
)
def migrate() -> None:
    """Bring the schema of a store to another revision."""


@migrate.command(epilog=examples("limpet migrate status", "limpet migrate status || limpet migrate up"))
@pass_setup
def status(setup: Setup) -> None:
    """Show at which revision the schema is.

    The exit code is 6 if this release cannot work on it as it is.
    """
    target = _target(setup)
    from limpet.schema.migrate import current_revision, taken_names

    revision, others = current_revision(target), taken_names(target)
    facts = {"url": setup.shown_url, "revision": revision, "needed": REVISION, "next": _advice(revision)}
    if setup.as_json:
        output.show({**facts, "taken": others})
    else:
        for name, fact in facts.items():
            output.show_line(f"{name:<12} {fact or 'none'}")
        for name in others:
            output.show_line(f"{'taken':<12} {describe_taken(name)}")
    if revision != REVISION:
        output.flush()
        sys.exit(6)


@migrate.command(epilog=examples("limpet migrate up", "limpet migrate up 0002"))
@click.argument("revision", default=REVISION)
@pass_setup
def up(setup: Setup, revision: str) -> None:
    """Migrate to REVISION, or to the one that this release needs.

    It happens completely or not at all. Where the database has no tables, they are made.
    """
    target = _target(setup)
    from limpet.schema.migrate import up as migrate_up

    _show_migrated(setup, migrate_up(target, revision), revision)


@migrate.command(epilog=examples("limpet migrate down 0001 --yes"))
@click.argument("revision")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@pass_setup
def down(setup: Setup, revision: str, yes: bool) -> None:
    """Migrate back to REVISION, for an earlier release.

    Everything that is stored stays. Only 'base', the revision before the first, removes it all.
    """
    target = _target(setup)
    from limpet.schema.migrate import BASE
    from limpet.schema.migrate import down as migrate_down

    if not yes:
        loss = "This deletes EVERYTHING that is stored there. " if revision == BASE else ""
        click.confirm(f"{loss}Migrate {setup.shown_url} down to {revision}?", abort=True, err=True)
    _show_migrated(setup, migrate_down(target, revision), None if revision == BASE else revision)


@migrate.command(epilog=examples("limpet migrate sql > up.sql", "limpet migrate sql 0002"))
@click.argument("revision", default=REVISION)
@pass_setup
def sql(setup: Setup, revision: str) -> None:
    """Print what 'up' would run, as one transaction.

    It reads the revision of the schema, and changes nothing.
    """
    target = _target(setup)
    from limpet.schema.migrate import sql as migrate_sql

    text = migrate_sql(target, revision)
    if setup.as_json:
        output.show({"revision": revision, "sql": text})
    elif text:
        output.write(text.encode())
    else:
        output.show_stderr(f"limpet: {setup.shown_url} is at schema revision {revision}: there is nothing to do")


# Inside -----------------------------------------------------------------------


def _target(setup: Setup) -> SchemaTarget:
    """Where the tables are. Only the engine knows what its URL says, and it is loaded by the URL's scheme."""
    # Encryption makes no difference to the tables.
    address = Address.parse(setup.url).without("encryption")
    if address.scheme not in _ENGINES:
        raise InvalidValue(f"{address} has no tables: migrating is for sqlite: and postgresql: URLs")
    if setup.file is not None and not setup.file.exists():
        raise Missing(
            f"there is no store at {address}{setup.why}: no such file",
            "A write makes it, with the schema of this release; --url or LIMPET_URL names another.",
        )
    # First, because it raises what to install where Alembic is missing.
    importlib.import_module("limpet.schema.migrate")
    engine: Any = importlib.import_module(f"limpet.engines.{_ENGINES[address.scheme]}.engine")
    found: SchemaTarget = engine.schema_target(address)
    return found


def _advice(revision: str | None) -> str:
    if revision == REVISION:
        return "nothing: it is as this release needs it"
    if revision is None:
        return "there are no tables: 'limpet migrate up' makes them, and so does the first write"
    if is_behind(revision):
        return "'limpet migrate up', or open the store with ?migrate=auto"
    return "use the release of Limpet that wrote it, or a later one"


def _show_migrated(setup: Setup, before: str | None, after: str | None) -> None:
    if setup.as_json:
        output.show({"url": setup.shown_url, "before": before, "revision": after})
    elif before == after:
        output.show_line(f"{setup.shown_url} is at schema revision {after} already")
    elif after is None:
        output.show_line(f"{setup.shown_url} has no tables any more; it was at schema revision {before}")
    else:
        was = "had no tables" if before is None else f"was at {before}"
        output.show_line(f"{setup.shown_url} is at schema revision {after}; it {was}")
