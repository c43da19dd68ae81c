"""``limpet folders`` and ``limpet namespaces``: what a store holds, at a glance."""

from __future__ import annotations

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, complete_key, pass_setup
from limpet.cli.commands import Command, examples
from limpet.keys import PAGE_MAX

__all__ = ["folders_command", "namespaces_command"]


@click.command(
    name="folders",
    cls=Command,
    epilog=examples("limpet folders", "limpet folders job/", "limpet folders session. --delimiter ."),
)
@click.argument("prefix", default="", shell_complete=complete_key)
@click.option("--delimiter", default="/", metavar="TEXT", help="What ends the name of a folder. [default: /]")
@pass_setup
def folders_command(setup: Setup, prefix: str, delimiter: str) -> None:
    """List one level of keys and folders, with numbers of keys.

    Only what starts with PREFIX is listed. A folder is all keys that are the same up to the next delimiter; it is shown
    with the delimiter at its end.
    """
    after: str | None = None
    is_empty = True
    with setup.open() as store:
        while True:
            page = store.children(prefix, delimiter=delimiter, limit=PAGE_MAX, after=after)
            for child in page.children:
                is_empty = False
                if setup.as_json:
                    output.show({"key": child.key, "folder": child.is_folder, "keys": child.keys})
                else:
                    output.show_line(f"{child.keys}\t{output.visible(child.key)}")
            if not page.truncated:
                break
            after = page.cursor
    if is_empty:
        output.show_note(f"nothing to list in {setup.place}")


@click.command(name="namespaces", cls=Command, epilog=examples("limpet namespaces", "limpet namespaces --json"))
@pass_setup
def namespaces_command(setup: Setup) -> None:
    """List the namespaces of the store that were written to."""
    with setup.open() as store:
        names = store.namespaces()
    for name in names:
        if setup.as_json:
            output.show({"namespace": name})
        else:
            output.show_line(name)
