"""``limpet stat``: what a namespace holds, or each namespace of the store."""

from __future__ import annotations

import heapq
from typing import Any, Final

import click

import limpet.sync
from limpet.cli import output
from limpet.cli.arguments import Setup, duration, pass_setup
from limpet.cli.commands import Command, examples
from limpet.clock import format_duration
from limpet.folders import Child
from limpet.keys import PAGE_MAX
from limpet.model import Entry
from limpet.protocol.json import entry_as_json, lock_as_json, status_as_json

__all__ = ["stat_command"]

SHOWN_MAX: Final = 20


@click.command(
    name="stat",
    cls=Command,
    epilog=examples(
        "limpet stat",
        "limpet stat --all                # every namespace",
        "limpet stat --prefixes           # where are the many keys?",
        "limpet stat --expiring 10m       # what ends soon?",
        "limpet stat --json | jq '.locks[]'",
    ),
)
@click.option("--all", "of_all", is_flag=True, help="A line for each namespace of the store.")
@click.option("--prefixes", is_flag=True, help=f"The {SHOWN_MAX} largest folders of keys.")
@click.option(
    "--expiring",
    type=duration,
    metavar="DURATION",
    help=f"The {SHOWN_MAX} keys that expire first, within this long. Reads all entries.",
)
@pass_setup
def stat_command(setup: Setup, of_all: bool, prefixes: bool, expiring: float | None) -> None:
    """Show what the namespace holds, and who holds its locks."""
    if of_all + prefixes + (expiring is not None) > 1:
        raise click.UsageError("give one of --all, --prefixes and --expiring")
    with setup.open() as store:
        if of_all:
            _show_namespaces(setup, store)
        elif prefixes:
            _show_folders(setup, store)
        elif expiring is not None:
            _show_expiring(setup, store, expiring)
        else:
            _show_one(setup, store)


def _show_one(setup: Setup, store: limpet.sync.Store) -> None:
    status, traits, locks = store.status(), store.traits, store.locks()
    facts: dict[str, Any] = {
        "url": setup.shown_url,
        "namespace": setup.namespace,
        "engine": traits.engine,
        "durability": traits.durability,
        "encrypted": traits.encrypted,
        **status_as_json(status),
    }
    if setup.as_json:
        output.show({**facts, "locks": [lock_as_json(held) for held in locks]})
        return
    for name, fact in facts.items():
        shown_fact = {True: "yes", False: "no"}[fact] if isinstance(fact, bool) else fact
        output.show_line(f"{name:<12} {shown_fact}")
    for held in locks:
        left = format_duration(held.remaining)
        output.show_line(
            f"{'lock':<12} {output.visible(held.name)} is held by {output.visible(held.holder)} "
            f"for another {left} unless renewed (token {held.token})"
        )
    if not locks:
        output.show_line(f"{'lock':<12} none is held")


def _show_namespaces(setup: Setup, store: limpet.sync.Store) -> None:
    names = store.namespaces()
    if names and not setup.as_json:
        output.show_heading(output.NAMESPACE_COLUMNS)
    for name in names:
        status = store.namespace(name).status()
        if setup.as_json:
            output.show({"namespace": name, **status_as_json(status)})
            continue
        numbers = (status.keys, status.size_bytes, status.revision, status.log_changes)
        output.show_columns(output.NAMESPACE_COLUMNS, [*(f"{number}" for number in numbers), output.visible(name)])
    if not names:
        output.show_note(f"no namespace of {setup.shown_url} was written to")


def _show_folders(setup: Setup, store: limpet.sync.Store) -> None:
    folders: list[Child] = []
    after: str | None = None
    while True:
        page = store.children(limit=PAGE_MAX, after=after)
        found = [child for child in page.children if child.is_folder]
        folders = heapq.nlargest(SHOWN_MAX, [*folders, *found], key=lambda child: child.keys)
        if not page.truncated:
            break
        after = page.cursor
    for child in folders:
        if setup.as_json:
            output.show({"prefix": child.key, "keys": child.keys})
        else:
            output.show_line(f"{child.keys}\t{output.visible(child.key)}")
    if not folders:
        output.show_note(f"no key of {setup.place} is in a folder, whose name ends with /")


def _show_expiring(setup: Setup, store: limpet.sync.Store, within_s: float) -> None:
    now_ms = store.status().now_ms
    last_ms = now_ms + round(within_s * 1000)
    soon = (entry for entry in store.scan() if entry.expires_ms is not None and entry.expires_ms <= last_ms)
    first = heapq.nsmallest(SHOWN_MAX, soon, key=_end)
    if first and not setup.as_json:
        output.show_heading(output.ENTRY_COLUMNS)
    for entry in first:
        if setup.as_json:
            output.show(entry_as_json(entry, with_value=False))
        else:
            output.show_columns(output.ENTRY_COLUMNS, output.entry_cells(entry, now_ms))
    if not first:
        output.show_note(f"nothing in {setup.place} expires within {format_duration(within_s)}")


def _end(entry: Entry) -> int:
    assert entry.expires_ms is not None
    return entry.expires_ms
