"""The keys of a map in order: what a span has, and how many."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from limpet.engines.sorted_keys import SortedKeys
from limpet.keys import Span, prefix_span

KEYS = st.text("ab", min_size=1, max_size=6)


class Counted(dict[str, Any]):
    """A map that counts how often a key is looked up."""

    lookups = 0

    def __contains__(self, key: object) -> bool:
        self.lookups += 1
        return super().__contains__(key)


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=150), KEYS)
def test_a_count_is_the_number_of_keys_between(writes: list[tuple[bool, str]], prefix: str) -> None:
    entries: dict[str, Any] = {}
    ordered = SortedKeys()
    for is_put, key in writes:
        if not is_put:
            entries.pop(key, None)
        elif key not in entries:
            ordered.add(key)
            entries[key] = 1
        for span in (prefix_span(prefix), prefix_span("")):
            assert ordered.count(span, entries) == sum(name in span for name in entries)
            assert list(ordered.between(span, entries)) == sorted(name for name in entries if name in span)


def test_a_count_looks_at_no_key() -> None:
    """A count of a million keys held the event loop for most of a second."""
    entries, ordered = Counted(), SortedKeys()
    for number in range(1000):
        ordered.add(f"{number:04}")
        entries[f"{number:04}"] = number

    assert ordered.count(Span("0100", "0900"), entries) == 800
    assert entries.lookups == 0

    del entries["0200"]
    assert ordered.count(Span("0100", "0900"), entries) == 799
    entries.lookups = 0
    assert ordered.count(Span("0100", "0900"), entries) == 799
    assert entries.lookups == 0
