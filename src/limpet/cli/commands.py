"""The form of the commands: their shared options, their order in the help, and how errors become exit codes."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from limpet import errors
from limpet.cli import failure, output
from limpet.cli.arguments import Setup

F = TypeVar("F", bound=Callable[..., Any])

SECTIONS: Final = {
    "Values": (
        *("get", "put", "append", "del", "take", "ls", "folders", "incr", "field"),
        *("touch", "persist", "txn", "call"),
    ),
    "Changes": ("watch", "history"),
    "Locks": ("lock", "locks"),
    "Serving": ("serve", "token"),
    "Maintenance": (
        *("namespaces", "stat", "top", "doctor", "backup", "restore", "epoch", "index", "encryption", "grant"),
        "migrate",
    ),
    "Semantic entries": ("audit", "deadletters"),
    "To learn": ("demo", "help", "completion"),
}

_NEGATIVE: Final = re.compile(r"-[\d.]")


def examples(*lines: str) -> str:
    """Examples for the end of a help text. The mark at the start keeps click from rewrapping them."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


# Options ----------------------------------------------------------------------


def shared_options() -> list[click.Option]:
    """The options that are accepted before a command and after it."""

    def choose(context: click.Context, parameter: click.Parameter, chosen: Any) -> None:
        setup = context.find_object(Setup)
        if setup is not None and chosen is not None:
            setup.choose(str(parameter.name), chosen)

    return [
        click.Option(["--url"], metavar="URL", expose_value=False, callback=choose, help="The URL of the store."),
        click.Option(
            ["-n", "--namespace"],
            metavar="NAME",
            expose_value=False,
            callback=choose,
            help="The namespace in the store.",
        ),
        click.Option(
            ["--json", "as_json"],
            is_flag=True,
            default=None,
            expose_value=False,
            callback=choose,
            help="Print JSON, one document a line.",
        ),
    ]


def condition_options(function: F) -> F:
    """The options that make a write depend on the present entry."""
    version = click.option("--if-version", type=int, metavar="N", help="Only if the key is at this version.")
    revision = click.option("--if-revision", type=int, metavar="N", help="Only if the key is at this revision.")
    return version(revision(function))


def write_options(function: F) -> F:
    """The options of every write."""
    fenced = click.option(
        "--fenced", is_flag=True, help="Only while the lock is held by the 'limpet lock' that runs this command."
    )
    request_id = click.option("--request-id", metavar="ID", help="Make the call safe to repeat for ten minutes.")
    return fenced(request_id(function))


# Commands and groups ----------------------------------------------------------


class Command(click.Command):
    """A command with the shared options. It accepts ``-5`` as a number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = shared_options()
        self.params += self.shared

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; an unknown option may be a negative number."""
        # Click would show the extra arguments, which may be part of a secret.
        ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, list(args))
        except click.NoSuchOption as error:
            if not _NEGATIVE.fullmatch(error.option_name):
                raise
            ctx.ignore_unknown_options = True
            rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            raise click.UsageError("there are too many arguments: put quotes around a value that holds spaces", ctx)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options first, and the shared ones under their own heading."""
        given = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        own = [option for option in given if option not in self.shared]
        for heading, options in (("Options", own), ("Options of every command", self.shared)):
            with formatter.section(heading):
                formatter.write_dl([row for option in options if (row := option.get_help_record(ctx)) is not None])


class LockCommand(Command):
    """A command whose last argument is another command, behind ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse. The ``--`` shows which options belong to which command."""
        words = list(args)
        wants_help = "-h" in words or "--help" in words
        if words and "--" not in words and not wants_help and not ctx.resilient_parsing:
            raise click.UsageError("the command to run comes after --, as in: limpet lock NAME -- COMMAND", ctx)
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing and ctx.params["command"] != tuple(words[words.index("--") + 1 :]):
            raise click.UsageError("give the name of one lock before --, and the command to run after it", ctx)
        return rest


class Group(click.Group):
    """A group of our commands."""

    command_class = Command


class Main(Group):
    """The outermost group: its commands under headings, and all errors turned into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the help."""
        return [name for names in SECTIONS.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings."""
        for heading, names in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=72)) for name in names])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Only here, its errors become messages and exit codes."""
        try:
            result = super().invoke(ctx)
            output.flush()
        except errors.LimpetError as error:
            setup = ctx.find_object(Setup)
            assert setup is not None
            output.flush_or_abandon()
            output.show_error(error, place=setup.place, as_json=setup.as_json)
            sys.exit(failure.exit_code(error))
        except output.Unwritable as error:
            output.abandon(sys.stdout)
            if not error.is_closed:
                output.show_stderr(f"limpet: {error}")
            sys.exit(128 + signal.SIGPIPE if error.is_closed else 1)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        return result
