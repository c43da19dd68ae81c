"""``limpet backup``, ``restore`` and ``epoch``: copy a store in use, make a store from a copy, begin a new epoch."""

from __future__ import annotations

import asyncio
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Command, examples
from limpet.cli.failure import Missing
from limpet.clock import SystemClock
from limpet.engine import Restoring
from limpet.errors import InvalidValue
from limpet.opening import open_engine
from limpet.urls import Address

if TYPE_CHECKING:
    from limpet.engines.sqlite import copy as sqlite_copy

SKIP: Final = 1_000_000
"""More revisions than most stores assign between a backup and its loss. Skipping them costs nothing."""

SHOWN_PAGES_MIN: Final = 5_000

_TOOLS: Final = {
    "postgresql": "pg_dump or pg_basebackup",
    "postgres": "pg_dump or pg_basebackup",
    "redis": "a copy of its RDB or append-only files",
    "rediss": "a copy of its RDB or append-only files",
    "nats": "'nats stream backup'",
    "tls": "'nats stream backup'",
    "http": "the tools of the engine behind that server",
    "https": "the tools of the engine behind that server",
}


_skip_option = click.option(
    "--skip",
    type=click.IntRange(1, 2**40),
    default=SKIP,
    metavar="N",
    help=f"Skip this many revisions and some more, so that none is assigned twice. [default: {SKIP:,}]",
)


@click.command(
    name="backup",
    cls=Command,
    epilog=examples(
        "limpet backup state-monday.db",
        "limpet backup latest.db --force    # replaces the last one",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@pass_setup
def backup_command(setup: Setup, file: Path, force: bool) -> None:
    """Copy a SQLite store into FILE, also while it is in use.

    FILE is a whole store of one moment, checked for damage, and readable only by its owner. Other engines have their
    own tools.
    """
    store = _file_of(setup, "is backed up")
    if not store.exists():
        raise Missing(f"there is no store at {setup.shown_url}{setup.why}: no such file", "--url names another.")
    from limpet.engines.sqlite import copy as sqlite_copy

    made = sqlite_copy.back_up(store, file, force=force, progress=_progress("copying"))
    if setup.as_json:
        output.show({"file": str(file), "bytes": made.size_bytes, "namespaces": made.namespaces, "epoch": made.epoch})
    else:
        output.show_line(f"{file} has {made.size_bytes:,} bytes and {_count(made.namespaces)}")


@click.command(
    name="restore",
    cls=Command,
    epilog=examples(
        "limpet restore state-monday.db",
        "limpet restore state-monday.db --url sqlite:///other.db",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@_skip_option
@pass_setup
def restore_command(setup: Setup, file: Path, skip: int) -> None:
    """Make a SQLite store from the backup FILE, in a new epoch.

    First stop every process that has the store open; while one has, this is refused. The present file is kept beside
    the new one. Earlier watchers have to start again, and revisions and lock tokens from before match nothing.
    """
    store = _file_of(setup, "is restored")
    if not file.is_file():
        raise Missing(f"there is no backup {str(file)!r}: no such file", "'limpet backup FILE' makes one.")
    from limpet.engines.sqlite import copy as sqlite_copy

    made = sqlite_copy.restore(file, store, skip=_leap(skip), progress=_progress("restoring"))
    if setup.as_json:
        aside = None if made.aside is None else str(made.aside)
        output.show({"url": setup.shown_url, "epoch": made.epoch, "namespaces": made.namespaces, "before": aside})
        return
    output.show_line(f"{setup.shown_url} is restored, in epoch {made.epoch}, with {_count(made.namespaces)}")
    if made.aside is not None:
        output.show_stderr(f"the store from before is kept as {made.aside}")


@click.command(
    name="epoch",
    cls=Command,
    epilog=examples(
        "limpet epoch",
        "limpet epoch --raise    # after pg_restore, and before anything starts",
    ),
)
@click.option("--raise", "raises", is_flag=True, help="Begin a new epoch.")
@_skip_option
@pass_setup
def epoch_command(setup: Setup, raises: bool, skip: int) -> None:
    """Show the epoch of a store, or begin a new one.

    Begin one after the data was restored with the tools of PostgreSQL or Redis, or lost its last writes: then
    positions, revisions and lock tokens from before match nothing. 'limpet restore' does it itself.
    """
    setup.check(make=False)
    epoch = asyncio.run(_raise(setup, skip) if raises else _show(setup))
    if setup.as_json:
        output.show({"url": setup.shown_url, "epoch": epoch})
    else:
        output.show_line(f"{setup.shown_url} is in epoch {epoch}")


# Inside -----------------------------------------------------------------------


def _file_of(setup: Setup, what: str) -> Path:
    """The file of a SQLite store. For another engine, raises with the tools to use instead."""
    setup.check(make=True)
    file, address = setup.file, Address.parse(setup.url)
    if file is not None:
        return file
    tools = _TOOLS.get(address.scheme, "the tools of its engine")
    raise InvalidValue(
        f"{address} {what} with {tools}; 'limpet epoch --raise' follows a restore. "
        "'limpet backup' and 'limpet restore' are for sqlite: URLs"
    )


async def _show(setup: Setup) -> int:
    engine = await open_engine(_plain(setup.url), SystemClock())
    try:
        return (await engine.status(setup.namespace)).epoch
    finally:
        await engine.close()


async def _raise(setup: Setup, skip: int) -> int:
    engine = await open_engine(_plain(setup.url), SystemClock())
    try:
        if not isinstance(engine, Restoring):
            raise InvalidValue(
                f"{setup.shown_url}: {engine.traits.engine} has no epochs to raise. Restore a stream of NATS under "
                "another bucket_prefix, and raise the epoch behind an HTTP server at its engine"
            )
        return await engine.raise_epoch(_leap(skip))
    finally:
        await engine.close()


def _leap(skip: int) -> int:
    """How many revisions to skip: another number each time, because a backup may be restored twice."""
    return skip + secrets.randbelow(skip)


def _plain(url: str) -> str:
    """The URL without encryption: an epoch does not depend on the values."""
    plain = Address.parse(url).without("encryption").url
    if Address.parse(url).scheme in ("http", "https"):
        return plain
    return f"{plain}{'&' if '?' in plain.rpartition('@')[2] else '?'}encryption=off"


def _progress(word: str) -> sqlite_copy.Progress:
    """Shows the progress of a long copy at a terminal."""

    def show(done: int, total: int) -> None:
        if total >= SHOWN_PAGES_MIN and sys.stderr is not None and sys.stderr.isatty():
            click.echo(f"\rlimpet: {word} {100 * done // total} %", err=True, nl=done == total)

    return show


def _count(namespaces: int) -> str:
    return f"{namespaces} namespace" + ("" if namespaces == 1 else "s")
