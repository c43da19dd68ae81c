"""Names of frameworks as keys: any character, any length, and no two names with one key."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from limpet.adapters.names import check_prefix, escape, shorten, unescape
from limpet.errors import InvalidKey, InvalidValue
from limpet.keys import check_key

NAMES = st.text(st.characters(blacklist_categories=()))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(NAMES)
@example("a/b%2Fc~\0\ud800")
@example("~")
@example("\ud83d\ude00")
def test_a_name_comes_back_as_it_was(name: str) -> None:
    escaped = escape(name)

    assert unescape(escaped) == name
    assert "/" not in escaped
    check_key(f"x{escaped}"[:200])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(NAMES, NAMES)
def test_no_two_names_have_one_key(one: str, other: str) -> None:
    keys = {shorten(escape(name), 8) for name in (one, other)}

    assert len(keys) == len({one, other})


def test_a_name_that_looks_like_a_hash_is_not_taken_for_one() -> None:
    hashed = shorten(escape("long" * 1000))

    assert hashed.startswith("~")
    assert escape(hashed) != hashed


@pytest.mark.parametrize("prefix", ["", "a" * 201, "\0"])
def test_a_prefix_is_a_short_key(prefix: str) -> None:
    with pytest.raises((InvalidKey, InvalidValue)):
        check_prefix(prefix)
