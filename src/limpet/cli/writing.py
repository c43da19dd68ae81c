"""What the commands that write share: what they expect of a key, the lock that they need, and how they end."""

from __future__ import annotations

import os
import re
from typing import Any

import click

import limpet
from limpet.cli import output
from limpet.cli.arguments import Setup
from limpet.model import Entry
from limpet.protocol.json import entry_as_json

__all__ = ["expectation", "fence_of", "show_written"]


def expectation(*, if_absent: bool = False, if_version: int | None = None, if_revision: int | None = None) -> Any:
    """What a write expects of its key."""
    if sum((if_absent, if_version is not None, if_revision is not None)) > 1:
        raise click.UsageError("give one of --if-absent, --if-version and --if-revision")
    if if_absent:
        return limpet.ABSENT
    if if_version is not None:
        return limpet.Version(if_version)
    return limpet.ANY if if_revision is None else limpet.Revision(if_revision)


def fence_of(fenced: bool) -> limpet.Fence | None:
    """The lock of the `limpet lock` that runs this process."""
    if not fenced:
        return None
    name, token = os.environ.get("LIMPET_LOCK"), os.environ.get("LIMPET_FENCING_TOKEN", "")
    if not name or not re.fullmatch(r"[0-9]{1,18}", token):
        raise click.UsageError(
            "--fenced works in a command that 'limpet lock NAME -- COMMAND' runs: "
            "LIMPET_LOCK and LIMPET_FENCING_TOKEN are not set"
        )
    return limpet.Fence(name, int(token))


def show_written(setup: Setup, entry: Entry) -> None:
    """Show the result of a write: to a program that wants JSON, and at a terminal."""
    if setup.as_json:
        output.show(entry_as_json(entry, with_value=False))
    elif output.on_terminal():
        output.show_line(f"version {entry.version} at revision {entry.revision}")
