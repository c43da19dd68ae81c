"""``limpet audit``: verify, show, seal and prune the audit trail of a namespace.

The keys of its hashes come from the environment, and never from the command line.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, duration, pass_setup
from limpet.cli.commands import Group, examples
from limpet.errors import InvalidValue

if TYPE_CHECKING:
    import limpet
    from limpet.semantic.audit import Audit
    from limpet.semantic.prune import Pruned
    from limpet.semantic.store import SemanticStore
    from limpet.semantic.verify import Report

ROW_COLUMNS: Final = {"seq": 6, "time": 25, "op": 8, "version": 8, "writer": 24, "purpose": 13, "key": 0}


def audit_of_environment() -> Audit:
    """The audit that the environment sets up. Raises where it sets up none."""
    from limpet.semantic.audit import Audit

    found = Audit.from_environment()
    if found is None:
        raise InvalidValue(
            "the keys of the trail are not set: set LIMPET_AUDIT_KEYS, or name a file in LIMPET_AUDIT_KEYS_FILE"
        )
    return found


async def semantic_store(store: limpet.Store, *, writes: bool = True) -> SemanticStore:
    """The semantic store of a namespace; for writes, with its trail."""
    from limpet.semantic.audit import Audit
    from limpet.semantic.rows import has_trail
    from limpet.semantic.store import SemanticStore

    if not writes:
        return SemanticStore(store)
    # A namespace that has a trail needs a row of this write as well, or the trail would have a gap.
    audit = audit_of_environment() if await has_trail(store) else Audit.from_environment()
    return SemanticStore(store, audit=audit)


@click.group(name="audit", cls=Group, epilog=examples("limpet audit verify", "limpet audit show tenant/acme/"))
def audit() -> None:
    """Verify and show the audit trail."""


@audit.command(epilog=examples("limpet audit verify", "limpet audit verify --anchor '150@1:3fb0…'"))
@click.option(
    "--anchor", metavar="ANCHOR", help="The anchor of an earlier verification: the trail must still go through it."
)
@pass_setup
def verify(setup: Setup, anchor: str | None) -> None:
    """Verify that the trail was not changed, nor an entry without a row in it.

    The exit code is 6 if something was. Keep the anchor elsewhere, for the next time.
    """
    keys = audit_of_environment()

    async def work(store: limpet.Store) -> Report:
        from limpet.semantic.verify import verify

        return await verify(store, keys, anchor=anchor)

    report = setup.run(work)
    if setup.as_json:
        output.show(report.to_dict())
    else:
        for name in ("sealed", "unsealed", "keys", "pending", "anchor"):
            output.show_line(f"{name:<12} {getattr(report, name)}")
        if report.pruned_to_ms is not None:
            output.show_line(f"{'pruned':<12} {report.pruned}, up to {_time(report.pruned_to_ms)}")
        for problem in report.problems:
            output.show_line(f"{problem.kind:<12} {output.visible(problem.place)}: {output.visible(problem.text)}")
        output.show_line(f"{'sound':<12} {'yes' if report.is_sound else 'no'}")
    if not report.is_sound:
        output.flush()
        sys.exit(6)


@audit.command(epilog=examples("limpet audit show", "limpet audit show tenant/acme/project/docs/ --json | tail -1"))
@click.argument("prefix", default="")
@pass_setup
def show(setup: Setup, prefix: str) -> None:
    """Show who changed what: the keys with PREFIX, oldest change first.

    Values are not in the trail; --json shows keyed hashes of them. Nothing is verified.
    """

    async def work(store: limpet.Store) -> None:
        from limpet.semantic.rows import rows_of

        async for row in rows_of(store, prefix=prefix):
            output.show(row) if setup.as_json else output.show_columns(ROW_COLUMNS, _cells(row))

    if not setup.as_json:
        output.show_heading(ROW_COLUMNS)
    setup.run(work)


@audit.command(epilog=examples("limpet audit seal"))
@pass_setup
def seal(setup: Setup) -> None:
    """Record what expired, and seal the new rows.

    Programs that keep an audited store open do it themselves, every two seconds.
    """
    keys = audit_of_environment()

    async def work(store: limpet.Store) -> int:
        from limpet.semantic.seal import Sealer

        return await Sealer(store, keys).turn()

    sealed = setup.run(work)
    output.show({"sealed": sealed}) if setup.as_json else output.show_line(f"{sealed} sealed")


def _before(_: click.Context, __: click.Parameter, text: str) -> datetime | timedelta:
    """Parse an age or a date. A date without a time zone is UTC."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        pass
    else:
        # To the library, digits alone are a date without dashes; everywhere else here they are seconds.
        if not text.strip().isdecimal():
            return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    try:
        return timedelta(seconds=duration(text))
    except (click.BadParameter, OverflowError):
        raise click.BadParameter(
            f"{text!r} is neither an age, such as 90d or 12h, nor a date, such as 2026-03-31"
        ) from None


@audit.command(epilog=examples("limpet audit prune --before 90d --dry-run", "limpet audit prune --before 2026-03-31"))
@click.option(
    "--before",
    required=True,
    callback=_before,
    metavar="AGE|DATE",
    help="Older than this age, or than this date in UTC.",
)
@click.option(
    "--anchor", metavar="ANCHOR", help="The anchor of an earlier verification: the trail must still go through it."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@pass_setup
def prune(setup: Setup, before: datetime | timedelta, anchor: str | None, dry_run: bool) -> None:
    """Remove sealed rows that are older.

    The trail is verified first, and nothing is removed if it is not sound. A signed mark shows from then on where it
    begins. It may be interrupted and started again.
    """
    keys = audit_of_environment()

    def show_progress(rows: int) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            output.show_stderr(f"limpet: {rows:,} rows removed")

    async def work(store: limpet.Store) -> Pruned:
        from limpet.semantic.prune import prune

        return await prune(store, keys, before=before, anchor=anchor, dry_run=dry_run, progress=show_progress)

    pruned = setup.run(work)
    to = None if pruned.to_ms is None else _time(pruned.to_ms)
    if setup.as_json:
        output.show({"rows": pruned.rows, "to": to, "unaudited": pruned.unaudited, "dry_run": dry_run})
        return
    done = "would be removed" if dry_run else "removed"
    output.show_line(f"{pruned.rows} {done}" + ("" if to is None else f", up to {to}"))
    if pruned.unaudited:
        output.show_stderr(
            f"limpet: {pruned.unaudited} of them recorded changes by other means; no row records those now"
        )


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cells(row: dict[str, Any]) -> list[str]:
    at = _time(row["at_ms"])
    seq = "-" if row["seq"] is None else str(row["seq"])
    return [seq, at, row["op"], str(row["version"]), *map(output.visible, (row["writer"], row["purpose"], row["key"]))]
