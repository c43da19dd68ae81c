"""The audit trail of a namespace: verify it, show it, seal what is new in it.

The keys of its hashes come from the environment, and never stand on a command line.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Group, examples
from limpet.errors import InvalidValue

if TYPE_CHECKING:
    import limpet
    from limpet.faces.audit import Audit
    from limpet.faces.sealing import Report
    from limpet.faces.semantic import SemanticStore

ROW_COLUMNS: Final = {"seq": 6, "time": 25, "op": 8, "version": 8, "writer": 24, "purpose": 13, "key": 0}


def audit_of_environment() -> Audit:
    """The audit that the environment sets up."""
    from limpet.faces.audit import Audit

    found = Audit.from_environment()
    if found is None:
        raise InvalidValue(
            "the keys of the trail are not known: set LIMPET_AUDIT_KEYS, or name a file by LIMPET_AUDIT_KEYS_FILE"
        )
    return found


async def semantic_store(store: limpet.Store, *, writes: bool = True) -> SemanticStore:
    """The semantic entries of a namespace, with its trail if something is to be written."""
    from limpet.faces.audit import Audit
    from limpet.faces.sealing import rows_of
    from limpet.faces.semantic import SemanticStore

    if not writes:
        return SemanticStore(store)
    async for _ in rows_of(store):
        # A namespace that has a trail gets a row of this as well, or the trail would not be whole.
        return SemanticStore(store, audit=audit_of_environment())
    return SemanticStore(store, audit=Audit.from_environment())


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
        from limpet.faces.sealing import verify

        return await verify(store, keys, anchor=anchor)

    report = setup.run(work)
    if setup.as_json:
        output.show(report.to_dict())
    else:
        for name in ("sealed", "unsealed", "keys", "pending", "anchor"):
            output.show_line(f"{name:<12} {getattr(report, name)}")
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
        from limpet.faces.sealing import rows_of

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
        from limpet.faces.sealing import Sealer

        return await Sealer(store, keys).turn()

    sealed = setup.run(work)
    output.show({"sealed": sealed}) if setup.as_json else output.show_line(f"{sealed} sealed")


def _cells(row: dict[str, Any]) -> list[str]:
    at = datetime.fromtimestamp(row["at_ms"] / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    seq = "-" if row["seq"] is None else str(row["seq"])
    return [seq, at, row["op"], str(row["version"]), *map(output.visible, (row["writer"], row["purpose"], row["key"]))]
