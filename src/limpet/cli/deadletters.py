"""``limpet deadletters``: list, show, replay or drop writes that were given up."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup
from limpet.cli.audit import semantic_store
from limpet.cli.commands import Group, examples
from limpet.cli.failure import Missing, quote_name
from limpet.errors import NotFound

if TYPE_CHECKING:
    import limpet
    from limpet.semantic.deadletters import DeadLetter, DeadLetters
    from limpet.semantic.store import Envelope

T = TypeVar("T")

LETTER_COLUMNS: Final = {"letter": 26, "time": 25, "code": 16, "attempts": 8, "key": 0}


@click.group(
    name="deadletters", cls=Group, epilog=examples("limpet deadletters list", "limpet deadletters replay LETTER")
)
def deadletters() -> None:
    """Show writes that were given up, and replay them."""


@deadletters.command(name="list", epilog=examples("limpet deadletters list", "limpet deadletters list --json"))
@pass_setup
def list_letters(setup: Setup) -> None:
    """List the letters of the namespace, oldest first, without their values."""

    async def work(store: limpet.Store) -> list[DeadLetter]:
        letters = _letters(store)
        found: list[DeadLetter] = []
        while page := await letters.list(after=found[-1].letter if found else None):
            found += page
        return found

    letters = setup.run(work)
    if setup.as_json:
        for letter in letters:
            output.show(letter.to_dict())
        return
    output.show_heading(LETTER_COLUMNS)
    for letter in letters:
        at = datetime.fromtimestamp(letter.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        output.show_columns(
            LETTER_COLUMNS, [letter.letter, at, letter.code, str(letter.attempts), output.visible(letter.key)]
        )


@deadletters.command(
    epilog=examples("limpet deadletters show 1700000000000-0a1b2c3d4e5f", "limpet deadletters show LETTER --value")
)
@click.argument("letter")
@click.option("--value", "with_value", is_flag=True, help="Show the value too, which may be a secret.")
@pass_setup
def show(setup: Setup, letter: str, with_value: bool) -> None:
    """Show a letter: the write, its writer, and its last error."""

    async def work(store: limpet.Store) -> DeadLetter:
        return await _letters(store).show(letter)

    document = _run(setup, letter, work).to_dict(with_value=with_value)
    if setup.as_json:
        output.show(document)
        return
    for name, member in document.items():
        text = output.visible(member) if isinstance(member, str) else output.json_text(member)
        output.show_line(f"{name:<16} {'-' if member is None else text}")


@deadletters.command(epilog=examples("limpet deadletters replay LETTER", "limpet deadletters replay LETTER --onto 7"))
@click.argument("letter")
@click.option("--onto", type=click.IntRange(0), metavar="VERSION", help="Expect this version; 0 for no such key.")
@pass_setup
def replay(setup: Setup, letter: str, onto: int | None) -> None:
    """Make the write of a letter, and drop the letter.

    The write expects the version that the letter has, or the one of --onto. If the key has another, nothing is changed,
    the letter stays, and the exit code is 4.
    """

    async def work(store: limpet.Store) -> Envelope:
        return await _letters(store).replay(letter, await semantic_store(store), expected_version=onto)

    envelope = _run(setup, letter, work)
    if setup.as_json:
        output.show(envelope.to_dict(with_value=False))
    else:
        output.show_line(f"{output.visible(envelope.key)} is at version {envelope.version}")


@deadletters.command(epilog=examples("limpet deadletters drop LETTER"))
@click.argument("letter")
@pass_setup
def drop(setup: Setup, letter: str) -> None:
    """Drop a letter. Its write is lost."""

    async def work(store: limpet.Store) -> None:
        if not await _letters(store).drop(letter):
            raise NotFound(letter)

    _run(setup, letter, work)
    if setup.as_json:
        output.show({"letter": letter, "dropped": True})


def _letters(store: limpet.Store) -> DeadLetters:
    from limpet.semantic.deadletters import DeadLetters

    return DeadLetters.beside(store)


def _run(setup: Setup, letter: str, work: Callable[[limpet.Store], Coroutine[Any, Any, T]]) -> T:
    """Run work, and raise `Missing` if there is no such letter."""
    try:
        return setup.run(work)
    except NotFound:
        text = f"there is no dead letter {quote_name(letter)} of {setup.place}"
        raise Missing(text, "'limpet deadletters list' lists them; -n chooses another namespace.", key=letter) from None
