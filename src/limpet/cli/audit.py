"""The audit trail of a namespace: verify it, show it, seal what is new in it, remove what is old.

The keys of its hashes come from the environment, and never stand on a command line.
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
    """The audit that the environment sets up."""
    from limpet.semantic.audit import Audit

    found = Audit.from_environment()
    if found is None:
        raise InvalidValue(
            "the keys of the trail are not known: set LIMPET_AUDIT_KEYS, or name a file by LIMPET_AUDIT_KEYS_FILE"
        )
    return found


async def semantic_store(store: limpet.Store, *, writes: bool = True) -> SemanticStore:
    """The semantic entries of a namespace, with its trail if something is to be written."""
    from limpet.semantic.audit import Audit
    from limpet.semantic.rows import has_trail
    from limpet.semantic.store import SemanticStore

    if not writes:
        return SemanticStore(store)
    # A namespace that has a trail gets a row of this as well, or the trail would not be whole.
    audit = audit_of_environment() if await has_trail(store) else Audit.from_environment()
    return SemanticStore(store, audit=audit)


@click.group(name="audit", cls=Group, epilog=examples("limpet audit verify", "limpet audit show tenant/acme/"))
def audit() -> None:
    """Verify and show the audit trail."""


@audit.command(epilog=examples("limpet audit verify", "limpet audit verify --anchor '150@1:3fb0…'"))
@click.option(
    "--anchor", metavar="ANCHOR", help="What an earlier verification gave: the trail must still go through it."
)
@pass_setup
def verify(setup: Setup, anchor: str | None) -> None:
    """Verify that nobody changed the trail, or the entries behind its back.

    The exit code is 6 if somebody did. Keep the anchor elsewhere, for the next time.
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
    """Show who changed what: the keys that begin with PREFIX, oldest change first.

    Values are not in the trail. With --json, the keyed hashes of them are shown. Nothing is verified.
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
    """Tell of what expired, and seal what is new.

    Programs that keep an audited store open do it by themselves, every two seconds.
    """
    keys = audit_of_environment()

    async def work(store: limpet.Store) -> int:
        from limpet.semantic.seal import Sealer

        return await Sealer(store, keys).turn()

    sealed = setup.run(work)
    output.show({"sealed": sealed}) if setup.as_json else output.show_line(f"{sealed} sealed")


def _before(_: click.Context, __: click.Parameter, text: str) -> datetime | timedelta:
    """How long ago, or a date. A date without a time zone is UTC."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        pass
    else:
        # Digits alone are a date of the basic form to the library, and seconds everywhere else here.
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
    "--anchor", metavar="ANCHOR", help="What an earlier verification gave: the trail must still go through it."
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@pass_setup
def prune(setup: Setup, before: datetime | timedelta, anchor: str | None, dry_run: bool) -> None:
    """Remove sealed rows that are older.

    The trail is verified first, and nothing is removed if it is not sound. A signed mark tells from then on where it
    begins. It may be interrupted and started again.
    """
    keys = audit_of_environment()

    def tell(rows: int) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            output.say(f"limpet: {rows:,} rows removed")

    async def work(store: limpet.Store) -> Pruned:
        from limpet.semantic.prune import prune

        return await prune(store, keys, before=before, anchor=anchor, dry_run=dry_run, progress=tell)

    pruned = setup.run(work)
    to = None if pruned.to_ms is None else _time(pruned.to_ms)
    if setup.as_json:
        output.show({"rows": pruned.rows, "to": to, "unaudited": pruned.unaudited, "dry_run": dry_run})
        return
    done = "would be removed" if dry_run else "removed"
    output.show_line(f"{pruned.rows} {done}" + ("" if to is None else f", up to {to}"))
    if pruned.unaudited:
        output.say(f"limpet: {pruned.unaudited} of them told of changes by other means, which nothing tells of now")


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cells(row: dict[str, Any]) -> list[str]:
    at = _time(row["at_ms"])
    seq = "-" if row["seq"] is None else str(row["seq"])
    return [seq, at, row["op"], str(row["version"]), *map(output.visible, (row["writer"], row["purpose"], row["key"]))]
