"""``limpet encryption``: the keys of an encrypted store."""

from __future__ import annotations

import sys
from typing import Final

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Group, examples
from limpet.encryption.keyring import PLAIN, new_key

__all__ = ["encryption"]

STEP: Final = 1000


@click.group(
    cls=Group,
    epilog=examples(
        "limpet encryption new >> keys.txt",
        "limpet --url 'sqlite:///state.db?encryption=file:keys.txt' encryption rotate",
        "limpet encryption list",
    ),
)
def encryption() -> None:
    """Make, change and list the keys of an encrypted store.

    The keys of a store are in LIMPET_ENCRYPTION_KEYS, or where its URL names them: ?encryption=env:NAME or
    ?encryption=file:PATH. They are written ID:KEY, one a line or between commas. The first one encrypts.
    """


@encryption.command(
    name="new", epilog=examples("limpet encryption new", "export LIMPET_ENCRYPTION_KEYS=$(limpet encryption new)")
)
@pass_setup
def new(setup: Setup) -> None:
    """Print a new key, as ID:KEY. It is kept nowhere else."""
    key_id, key = new_key()
    if setup.as_json:
        output.show({"id": key_id, "key": key})
    else:
        output.show_line(f"{key_id}:{key}")


@encryption.command(
    name="rotate", epilog=examples("limpet encryption rotate", "limpet encryption rotate trivia billing")
)
@click.argument("namespaces", nargs=-1, metavar="[NAMESPACE]...")
@pass_setup
def rotate(setup: Setup, namespaces: tuple[str, ...]) -> None:
    """Encrypt with the current key all that another key encrypted, or none.

    That is the entries, the audit trail, and the copies of expired entries that can be recovered. It may run while
    other processes read and write, and again after it was interrupted. Each entry that it encrypts gets a new version
    and a change in the log.
    """
    with setup.open() as opened:
        for name in namespaces or (setup.namespace,):
            store = opened.namespace(name)
            examined = resealed = 0
            after: str | None = None
            while True:
                step = store.reseal(after=after, limit=STEP)
                examined, resealed, after = examined + step.looked_at, resealed + step.resealed, step.cursor
                if after is None:
                    break
                if sys.stderr is not None and sys.stderr.isatty():
                    output.show_stderr(f"limpet: {name}: {examined:,} entries read, {resealed:,} encrypted again")
            found = store.seals()
            older = [seal.key_id for seal in found if not seal.is_current and seal.entries + seal.changes]
            if setup.as_json:
                counts = {"namespace": name, "entries": examined, "resealed": resealed}
                output.show({**counts, "key": found[0].key_id, "still_used": older})
                continue
            output.show_line(
                f"{name}: {resealed:,} of {examined:,} entries were encrypted again, with key {found[0].key_id}"
            )
            if older:
                output.show_stderr(
                    f"limpet: keep {', '.join(older)}: the log of {name} still needs it. See 'limpet encryption list'"
                )


@encryption.command(
    name="list", epilog=examples("limpet encryption list", "limpet encryption list --json | jq -r .key")
)
@click.argument("namespaces", nargs=-1, metavar="[NAMESPACE]...")
@pass_setup
def list_(setup: Setup, namespaces: tuple[str, ...]) -> None:
    """Show how many entries, and changes in the log, each key has encrypted.

    A key without any may be removed ten minutes later, when the receipts that it encrypted have expired.
    """
    with setup.open() as opened:
        for name in namespaces or (setup.namespace,):
            for seal in opened.namespace(name).seals():
                use = "encrypts" if seal.is_current else "is read"
                if setup.as_json:
                    output.show(
                        {
                            "namespace": name,
                            "key": seal.key_id,
                            "current": seal.is_current,
                            "entries": seal.entries,
                            "changes": seal.changes,
                        }
                    )
                else:
                    what = "not encrypted" if seal.key_id == PLAIN else f"key {seal.key_id} {use}"
                    output.show_line(f"{name}: {seal.entries:,} entries, {seal.changes:,} changes: {what}")
