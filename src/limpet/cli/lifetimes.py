"""``limpet touch``, ``persist`` and ``take``: when a key ends, and reading it for the last time."""

from __future__ import annotations

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, complete_key, duration, pass_setup
from limpet.cli.commands import Command, condition_options, examples, write_options
from limpet.cli.writing import expectation, fence_of, show_written
from limpet.errors import NotFound
from limpet.protocol.json import plain

__all__ = ["persist_command", "take_command", "touch_command"]


@click.command(
    name="touch", cls=Command, epilog=examples("limpet touch session/42 30m", "limpet touch job/7 5m --if-version 3")
)
@click.argument("key", shell_complete=complete_key)
@click.argument("ttl", type=duration, metavar="DURATION")
@condition_options
@write_options
@pass_setup
def touch_command(
    setup: Setup,
    key: str,
    ttl: float,
    if_version: int | None,
    if_revision: int | None,
    fenced: bool,
    request_id: str | None,
) -> None:
    """Let KEY expire after DURATION from now.

    The value and the version stay as they are.
    """
    _touch(setup, key, ttl, if_version, if_revision, fenced, request_id)


@click.command(name="persist", cls=Command, epilog=examples("limpet persist session/42"))
@click.argument("key", shell_complete=complete_key)
@condition_options
@write_options
@pass_setup
def persist_command(
    setup: Setup, key: str, if_version: int | None, if_revision: int | None, fenced: bool, request_id: str | None
) -> None:
    """Let KEY never expire."""
    _touch(setup, key, None, if_version, if_revision, fenced, request_id)


def _touch(
    setup: Setup,
    key: str,
    ttl: float | None,
    if_version: int | None,
    if_revision: int | None,
    fenced: bool,
    request_id: str | None,
) -> None:
    expect, fence = expectation(if_version=if_version, if_revision=if_revision), fence_of(fenced)
    with setup.open() as store:
        entry = store.touch(key, ttl, expect=expect, fence=fence, request_id=request_id)
    if entry is None:
        raise NotFound(key)
    show_written(setup, entry)


@click.command(
    name="take",
    cls=Command,
    epilog=examples("limpet take invitation/9f2", "limpet take invitation/9f2 --raw --request-id order-17"),
)
@click.argument("key", shell_complete=complete_key)
@click.option("-r", "--raw", is_flag=True, help="Print a string or bytes exactly, without quotes or newline.")
@condition_options
@write_options
@pass_setup
def take_command(
    setup: Setup,
    key: str,
    raw: bool,
    if_version: int | None,
    if_revision: int | None,
    fenced: bool,
    request_id: str | None,
) -> None:
    """Delete KEY, and print the value that it had.

    Of several processes that take one key, one gets the value. The others exit with 3.
    """
    expect, fence = expectation(if_version=if_version, if_revision=if_revision), fence_of(fenced)
    missing = object()
    with setup.open() as store:
        value = store.take(key, missing, expect=expect, fence=fence, request_id=request_id)
    if value is missing:
        raise NotFound(key)
    if setup.as_json:
        output.show({"key": key, "value": plain(value)})
    else:
        output.show_value(value, raw=raw)
