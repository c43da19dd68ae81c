"""``limpet export``, ``import`` and ``copy``: move entries into a file and out of it, and from one store to another."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

import limpet
from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Command, examples
from limpet.cli.progress import progress_of
from limpet.moving.loader import Policy

if TYPE_CHECKING:
    from limpet.moving.loader import Report

F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["copy_command", "export_command", "import_command", "policy_option", "show_report"]


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

    They are those of all namespaces, or of each NAMESPACE that is named. Each entry is a line of JSON with its value, version and times. FILE is readable only by its owner; - is standard
    output. If it is interrupted, run it again: it goes on where it ended. Locks and the audit trail stay behind.
    """
    from limpet.moving import export

    async def work(store: limpet.Store) -> Any:
        names = await _names(store, namespaces)
        with progress_of("exporting", await _count(store, names)) as progress:
            if str(file) == "-":
                output.flush()
                out = sys.stdout.buffer
                return await export.export_stream(store, out, names, redact=redact, progress=progress.show)
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

    They keep their versions and times.     Entries that are there already are left alone, so an import that was interrupted is simply run again. FILE is
    compared with its checksum before anything is written; - is standard input, which is compared at its end.
    """
    from limpet.moving import export

    async def work(store: limpet.Store) -> Report:
        with progress_of("importing") as progress:
            options: dict[str, Any] = {"policy": policy, "dry_run": dry_run, "progress": progress.report}
            if str(file) == "-":
                return await export.import_stream(store, sys.stdin.buffer, namespaces, **options)
            return await export.import_file(store, file, namespaces, **options)

    show_report(setup, setup.run(work, make=True), "import", dry_run=dry_run)


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

    They keep their versions and times. They are those of all namespaces, or of each NAMESPACE that is named. What is written to FROM meanwhile may be missing: stop its writers first,
    or copy again with --on-conflict newer. A copy that was interrupted is simply run again.
    """
    from limpet.moving.entries import entries_of
    from limpet.moving.loader import load

    there, here = Setup(source, setup.namespace, setup.as_json), Setup(target, setup.namespace, setup.as_json)
    there.check(make=False)
    here.check(make=True)

    async def work() -> Report:
        async with (
            limpet.open(source, namespace=setup.namespace, sweep=False) as first,
            limpet.open(target, namespace=setup.namespace, sweep=False) as second,
        ):
            names = await _names(first, namespaces)
            with progress_of("copying", await _count(first, names)) as progress:
                entries = entries_of(first, names)
                return await load(second, entries, policy=policy, dry_run=dry_run, progress=progress.report)

    show_report(here, asyncio.run(work()), "copy", dry_run=dry_run)


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


async def _names(store: limpet.Store, chosen: Sequence[str]) -> list[str]:
    """The namespaces to move: those chosen, or all but the server's own."""
    if chosen:
        return list(dict.fromkeys(chosen))
    return await store.namespaces()


async def _count(store: limpet.Store, names: Sequence[str]) -> int:
    """About how many entries there are."""
    return sum([(await store.namespace(name).status()).keys for name in names])
