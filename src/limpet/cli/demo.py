"""``limpet demo``: nine short acts that show what the store promises."""

from __future__ import annotations

import sys

import click

from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.commands import Command, examples

__all__ = ["demo_command"]


@click.command(name="demo", cls=Command, epilog=examples("limpet demo", "limpet demo --fast"))
@click.option("--fast", is_flag=True, help="Without the pauses that make it readable.")
@pass_setup
def demo_command(setup: Setup, fast: bool) -> None:
    """Show what the store promises, on a file in a temporary folder.

    Nothing of yours is read or written.
    """
    from limpet.demo.acts import main

    sys.exit(main(["--once", *(["--fast"] if fast else [])]))
