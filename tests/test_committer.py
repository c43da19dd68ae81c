"""What a process remembers of the entries that it has seen, to plan on."""

from __future__ import annotations

from typing import Any

from limpet.commit.committer import NAMESPACES_MAX, Committer


def test_what_is_known_of_namespaces_has_a_bound() -> None:
    """A server with a namespace for each of its users must not grow with all that it has ever seen."""
    storage: Any = None
    committer = Committer(storage, "a store")

    known = [committer.known(f"user-{number}") for number in range(NAMESPACES_MAX + 10)]

    assert len(committer._known) == NAMESPACES_MAX
    assert committer.known(f"user-{NAMESPACES_MAX + 9}") is known[-1]
    assert committer.known("user-0") is not known[0]
