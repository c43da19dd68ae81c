"""``limpet locks``: who holds which lock."""

from __future__ import annotations

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Command, examples
from limpet.clock import format_duration
from limpet.protocol.json import lock_as_json

__all__ = ["locks_command"]


@click.command(
    name="locks",
    cls=Command,
    epilog=examples(
        "limpet locks",
        "limpet locks deploy/",
        """limpet call unlock '{"name": "deploy", "reason": "its host is gone"}'""",
    ),
)
@click.argument("prefix", default="")
@pass_setup
def locks_command(setup: Setup, prefix: str) -> None:
    """List the locks that are held: all, or those that start with PREFIX.

    Each line has the fencing token, for how long it still lasts unless it is renewed, the holder, and the name.
    """
    with setup.open() as store:
        held = store.locks(prefix)
    if held and not setup.as_json:
        output.show_heading(output.LOCK_COLUMNS)
    for lock in held:
        if setup.as_json:
            output.show(lock_as_json(lock))
        else:
            names = output.visible(lock.holder), output.visible(lock.name)
            output.show_columns(output.LOCK_COLUMNS, [str(lock.token), format_duration(lock.remaining), *names])
    if not held:
        output.show_note(f"no lock is held in {setup.place}")
