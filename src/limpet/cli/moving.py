"""``limpet export``, ``import`` and ``copy``: move entries into a file and out of it, and from one store to another."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

import limpet
from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Command, examples
from limpet.cli.failure import Missing
from limpet.cli.progress import progress_of
from limpet.errors import InvalidValue
from limpet.moving.loader import Policy
from limpet.urls import Address

if TYPE_CHECKING:
    from limpet.moving.adopt import Adoption
    from limpet.moving.loader import Report
    from limpet.moving.sources import ForeignData

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["adopt_command", "copy_command", "export_command", "import_command", "policy_option", "show_report"]


def policy_option(default: Policy) -> Callable[[F], F]:
    """The option that decides what becomes of other entries in the store."""
    return click.option(
        "--on-conflict",
        "policy",
        type=click.Choice(get_args(Policy)),
        default=default,
        help=f"Where the store has another entry: stop, keep it, replace it, or replace an older one. "
        f"[default: {default}]",
    )


dry_run_option = click.option("--dry-run", is_flag=True, help="Compare and report, but write nothing.")


@click.command(
    name="export",
    cls=Command,
    epilog=examples(
        "limpet export state.ndjson",
        "limpet export trivia.ndjson trivia    # one namespace",
        "limpet export - --redact | head       # without values",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("namespaces", nargs=-1, metavar="[NAMESPACE]...")
@click.option("--redact", is_flag=True, help="Leave out values and meta. Such a file cannot be imported.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@pass_setup
def export_command(setup: Setup, file: Path, namespaces: tuple[str, ...], redact: bool, force: bool) -> None:
    """Write the entries of a store into FILE.

    They are those of all namespaces, or of each NAMESPACE that is named. Each is a line of JSON with its value, version
    and times. FILE is readable only by its owner; - is standard output. If it is interrupted, run it again: it goes on
    where it ended. Locks and the audit trail stay behind.
    """
    from limpet.moving import export

    async def work(store: limpet.Store) -> Any:
        names = await _names(store, namespaces)
        with progress_of("exporting", await _count(store, names)) as progress:
            if str(file) == "-":
                return await export.export_stream(store, _Stdout(), names, redact=redact, progress=progress.show)
            return await export.export_file(store, file, names, redact=redact, force=force, progress=progress.show)

    end = setup.run(work)
    if str(file) == "-":
        return
    if setup.as_json:
        output.show({"file": str(file), "entries": end.entries, "sha256": end.sha256})
    else:
        output.show_line(f"{file} has {output.count(end.entries, 'entry', 'entries')}")


@click.command(
    name="import",
    cls=Command,
    epilog=examples(
        "limpet import state.ndjson --url postgresql://db/app",
        "limpet import state.ndjson --dry-run",
        "limpet import state.ndjson --on-conflict newer",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("namespaces", nargs=-1, metavar="[NAMESPACE]...")
@policy_option("refuse")
@dry_run_option
@pass_setup
def import_command(setup: Setup, file: Path, namespaces: tuple[str, ...], policy: Policy, dry_run: bool) -> None:
    """Write the entries of an export into the store.

    They keep their versions and times. Entries that are there already are left alone, so an import that was interrupted
    is simply run again. FILE is compared with its checksum before anything is written; - is standard input, which is
    compared at its end.
    """
    from limpet.moving import export

    async def work(store: limpet.Store) -> Report:
        with progress_of("importing") as progress:
            options: dict[str, Any] = {"policy": policy, "dry_run": dry_run, "progress": progress.report}
            if str(file) == "-":
                return await export.import_stream(store, sys.stdin.buffer, namespaces, **options)
            return await export.import_file(store, file, namespaces, **options)

    show_report(setup, _run_into(setup, work, dry_run), "import", dry_run=dry_run)


@click.command(
    name="copy",
    cls=Command,
    epilog=examples(
        "limpet copy sqlite:///state.db postgresql://db/app",
        "limpet copy redis://cache:6379/0 sqlite:///a.db trivia    # one namespace",
    ),
)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.argument("namespaces", nargs=-1, metavar="[NAMESPACE]...")
@policy_option("refuse")
@dry_run_option
@pass_setup
def copy_command(
    setup: Setup, source: str, target: str, namespaces: tuple[str, ...], policy: Policy, dry_run: bool
) -> None:
    """Copy the entries of the store FROM into the store TO.

    They keep their versions and times, and are those of all namespaces, or of each NAMESPACE that is named. What is
    written to FROM meanwhile may be missing: stop its writers first, or copy again with --on-conflict newer. A copy
    that was interrupted is simply run again.
    """
    from limpet.moving.entries import entries_of
    from limpet.moving.loader import load

    there, here = Setup(source, setup.namespace, setup.as_json), Setup(target, setup.namespace, setup.as_json)
    there.check(make=False)

    async def work(second: limpet.Store) -> Report:
        async with limpet.open(source, namespace=setup.namespace, sweep=False) as first:
            names = await _names(first, namespaces)
            with progress_of("copying", await _count(first, names)) as progress:
                entries = entries_of(first, names)
                return await load(second, entries, policy=policy, dry_run=dry_run, progress=progress.report)

    show_report(here, _run_into(here, work, dry_run), "copy", dry_run=dry_run)


def show_report(setup: Setup, report: Report, what: str, *, dry_run: bool) -> None:
    """Print what became of the entries."""
    if setup.as_json:
        examples_shown = [{"namespace": name, "key": key, "reason": why} for name, key, why in report.examples]
        counted = {name: getattr(report, name) for name in report.__struct_fields__ if name != "examples"}
        output.show({"url": setup.shown_url, "dry_run": dry_run, **counted, "examples": examples_shown})
        return
    would = "would be " if dry_run else ""
    output.show_line(f"{output.count(report.read, 'entry', 'entries')} read, {report.written:,} {would}written")
    for count, text in (
        (report.same, "there already"),
        (report.kept, "kept as the store has them"),
        (report.expired, "expired meanwhile"),
        (report.rejected, "rejected"),
    ):
        if count:
            output.show_line(f"{count:,} {text}")
    for namespace, key, reason in report.examples:
        output.show_stderr(f"limpet: {what}: {namespace}: {output.visible(key)}: {reason}")


def _run_into(setup: Setup, work: Callable[[limpet.Store], Coroutine[Any, Any, T]], dry_run: bool) -> T:
    """Run work with the store that is written to. A dry run does not make one, and compares with an empty one."""
    url = setup.url
    if dry_run and setup.file is not None and not setup.file.exists():
        url = "memory:"
    else:
        setup.check(make=True)

    async def open_and_work() -> T:
        async with limpet.open(url, namespace=setup.namespace, sweep=False) as store:
            return await work(store)

    return asyncio.run(open_and_work())


async def _open_and_close(open_data: Callable[[], Coroutine[Any, Any, ForeignData]]) -> None:
    async with _closing(await open_data()):
        pass


@asynccontextmanager
async def _closing(data: ForeignData) -> AsyncIterator[ForeignData]:
    try:
        yield data
    finally:
        await data.close()


class _Stdout:
    """Standard output, whose reader may leave."""

    write = staticmethod(output.write)
    flush = staticmethod(output.flush)


async def _names(store: limpet.Store, chosen: Sequence[str]) -> list[str]:
    """The namespaces to move: those chosen, or all but the server's own."""
    if not chosen:
        return await store.namespaces()
    names = list(dict.fromkeys(chosen))
    for name in names:
        if not (await store.namespace(name).status()).revision:
            raise Missing(f"nothing was written to namespace {name!r}", "'limpet namespaces' lists those there are.")
    return names


async def _count(store: limpet.Store, names: Sequence[str]) -> int:
    """About how many entries there are."""
    return sum([(await store.namespace(name).status()).keys for name in names])


@click.command(
    name="adopt",
    cls=Command,
    epilog=examples(
        "limpet adopt bot.json --into sqlite:///state.db --dry-run",
        "limpet adopt sqlite:///bot.db --into sqlite:///bot.db",
        "limpet adopt 'nats://bus:4222?bucket=agents' --into sqlite:///state.db",
    ),
)
@click.argument("source")
@click.option("--into", required=True, metavar="URL", help="The URL of the store that adopts it.")
@click.option("--table", type=click.Choice(["state", "plugin_kv_storage"]), help="The table, if there are both.")
@click.option("--undo", is_flag=True, help="Put a table that was adopted in place back, as it was then.")
@policy_option("newer")
@dry_run_option
@pass_setup
def adopt_command(
    setup: Setup, source: str, into: str, table: str | None, undo: bool, policy: Policy, dry_run: bool
) -> None:
    """Take over the data of another program.

    SOURCE is a sqlite: or postgresql: URL with a table state or plugin_kv_storage; redis://host/0?prefix=gbe:state: for
    hashes; nats://host?bucket=NAME; a JSON file or a folder of them; shelve:FILE; or diskcache:FOLDER. What was brought
    is left alone, so it is safe to repeat. A table in the store's own database is renamed, and a view has its place.
    """
    from limpet.moving.adopt import adopt
    from limpet.moving.sources import open_source

    here = Setup(into, setup.namespace, setup.as_json)
    # The store warns of a table that is in the place of its view: the one to adopt.
    logging.getLogger("limpet.schema").setLevel(logging.ERROR)

    async def open_data() -> ForeignData:
        return await open_source(source, Address.parse(into), namespace=setup.namespace, table=table)

    async def put_back() -> str:
        async with _closing(await open_data()) as data:
            return await give_back(data)

    async def work(store: limpet.Store) -> Adoption:
        async with _closing(await open_data()) as data:
            with progress_of("adopting", await data.count()) as progress:
                return await adopt(store, data, policy=policy, dry_run=dry_run, progress=progress.report)

    if undo:
        undone = asyncio.run(put_back())
        output.show({"url": here.shown_url, "undone": undone}) if setup.as_json else output.show_line(undone)
        return
    # A store is not made for a source that is not there.
    asyncio.run(_open_and_close(open_data))
    done = _run_into(here, work, dry_run)
    show_report(here, done.total, "adopt", dry_run=dry_run)
    if done.handed_over is not None and not setup.as_json:
        output.show_line(done.handed_over)
    if done.total.rejected:
        raise InvalidValue(
            f"{output.count(done.total.rejected, 'entry', 'entries')} of {source_shown(source)} cannot be stored, and "
            "nothing was handed over: change or delete them there, and run it again"
        )


async def give_back(data: ForeignData) -> str:
    """Undo a hand-over."""
    from limpet.moving.sources import WithRows

    if not isinstance(data, WithRows):
        raise InvalidValue(f"{data.shown}: only a table is put back")
    return await data.give_back()


def source_shown(source: str) -> str:
    """A source for messages, without credentials."""
    return str(Address.parse(source)) if "://" in source else source
