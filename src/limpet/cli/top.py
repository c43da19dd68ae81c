"""``limpet top``: which namespaces are at work, now."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, duration, pass_setup
from limpet.cli.commands import Command, examples
from limpet.model import Status
from limpet.store import Store

__all__ = ["top_command"]

CLEAR: Final = "\x1b[H\x1b[2J"
NAMESPACES_MAX: Final = 200


@click.command(
    name="top",
    cls=Command,
    epilog=examples("limpet top", "limpet top --interval 5s", "limpet top --count 1 --json | jq -r .namespace"),
)
@click.option(
    "--interval", type=duration, default="2s", show_default=True, metavar="DURATION", help="How long each look lasts."
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after this many looks.")
@pass_setup
def top_command(setup: Setup, interval: float, count: int | None) -> None:
    """Show which namespaces are at work, again and again.

    Each line has the changes a second since the last look, keys, bytes, locks that are held, and the namespace; the
    busiest come first. Ctrl-C ends it.
    """
    setup.run(lambda store: _look_on(setup, store, interval, count))


async def _look_on(setup: Setup, store: Store, interval_s: float, count: int | None) -> None:
    before, began = await _statuses(store), time.monotonic()
    looks = 0
    while count is None or looks < count:
        await asyncio.sleep(interval_s)
        now, ended = await _statuses(store), time.monotonic()
        rates = {name: _changes(before.get(name), status) / (ended - began) for name, status in now.items()}
        busiest = sorted(now, key=lambda name: (-rates[name], name))
        rows = [(name, rates[name], now[name], len(await store.namespace(name).locks())) for name in busiest]
        _show(setup, rows)
        before, began, looks = now, ended, looks + 1


async def _statuses(store: Store) -> dict[str, Status]:
    names = (await store.namespaces())[:NAMESPACES_MAX]
    return {name: await store.namespace(name).status() for name in names}


def _changes(before: Status | None, now: Status) -> int:
    return now.revision - (0 if before is None else before.revision)


def _show(setup: Setup, rows: list[tuple[str, float, Status, int]]) -> None:
    if setup.as_json:
        for name, rate, status, locks in rows:
            counts = {"keys": status.keys, "bytes": status.size_bytes, "locks": locks}
            output.show({"namespace": name, "changes_per_second": round(rate, 2), **counts})
        output.flush()
        return
    if output.on_terminal():
        output.write(CLEAR.encode())
        word = "namespace" if len(rows) == 1 else "namespaces"
        output.show_line(f"{setup.shown_url}, {len(rows)} {word}, {time.strftime('%H:%M:%S')}\n")
    output.show_heading(output.TOP_COLUMNS)
    for name, rate, status, locks in rows:
        cells = [f"{rate:,.1f}", f"{status.keys:,}", f"{status.size_bytes:,}", str(locks), name]
        output.show_columns(output.TOP_COLUMNS, cells)
    output.flush()
