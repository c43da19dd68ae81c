"""``limpet completion`` and ``limpet help``: what a shell and a newcomer need."""

from __future__ import annotations

import click

from limpet.cli import output
from limpet.cli.commands import Command, examples

__all__ = ["completion_command", "help_command"]


@click.command(
    name="completion",
    cls=Command,
    epilog=examples("limpet completion bash", "limpet completion fish"),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print what makes SHELL complete commands, options and keys.

    SHELL is bash, zsh or fish. The line for ~/.bashrc is: eval "$(limpet completion bash)"
    """
    from click.shell_completion import get_completion_class

    maker = get_completion_class(shell)
    assert maker is not None, "click has each of the choices"
    output.show_line(maker(context.find_root().command, {}, "limpet", "_LIMPET_COMPLETE").source())


@click.command(name="help", cls=Command, epilog=examples("limpet help", "limpet help put", "limpet help field set"))
@click.argument("command", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def help_command(context: click.Context, command: tuple[str, ...]) -> None:
    """Show the help of COMMAND, as 'limpet COMMAND --help' does."""
    root = context.find_root()
    shown, within = root.command, click.Context(root.command, info_name="limpet")
    for word in command:
        found = shown.get_command(within, word) if isinstance(shown, click.Group) else None
        if found is None:
            raise click.UsageError(f"there is no command {' '.join(command)!r}; 'limpet help' lists them")
        shown, within = found, click.Context(found, info_name=word, parent=within)
    output.show_line(shown.get_help(within))
