"""The grammar of names, and prefixes as ranges."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from limpet.errors import InvalidKey, InvalidNamespace
from limpet.keys import KEY_BYTES_MAX, Span, check_key, check_namespace, key_span, pattern_span, prefix_span

# Where a range goes wrong: at the ends of UTF-8's lengths, around the surrogates, at the last code point.
EDGES = "\x01 /*0aAb~\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010fffe\U0010ffff"
keys = st.text(st.sampled_from(EDGES), min_size=1, max_size=5) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8
)
thorough = settings(max_examples=500, deadline=None)


@thorough
@given(keys, st.just("") | keys)
@example("\ue000", "\ud7ff")
@example("\U0010ffff\U0010ffff", "\U0010ffff")
@example("a\U0010ffffz", "a\U0010ffff")
@example("b", "a\U0010ffff")
def test_a_prefix_is_the_range_of_the_keys_that_start_with_it(key: str, prefix: str) -> None:
    assert (key in prefix_span(prefix)) == key.startswith(prefix)


@thorough
@given(keys, keys)
def test_a_prefix_is_the_range_of_what_starts_with_it(prefix: str, rest: str) -> None:
    assert prefix in prefix_span(prefix)
    assert prefix + rest in prefix_span(prefix)
    assert prefix[:-1] == "" or prefix[:-1] not in prefix_span(prefix)


@thorough
@given(st.lists(keys, max_size=20), st.just("") | keys)
def test_a_prefix_is_a_run_of_the_sorted_keys(some: list[str], prefix: str) -> None:
    inside = [key in prefix_span(prefix) for key in sorted(some)]

    first = inside.index(True) if True in inside else 0
    assert all(inside[first : first + inside.count(True)])


@thorough
@given(keys, keys)
def test_the_order_of_keys_is_that_of_their_bytes(one: str, other: str) -> None:
    assert (one < other) == (one.encode() < other.encode())


@thorough
@given(st.just("") | keys)
def test_the_ends_of_a_range_can_be_encoded(prefix: str) -> None:
    span = prefix_span(prefix)

    span.start.encode()
    assert span.stop is None or span.stop.encode()


@pytest.mark.parametrize(
    ("prefix", "span"),
    [
        ("", Span("", None)),
        ("a", Span("a", "b")),
        ("config/", Span("config/", "config0")),
        ("\ud7ff", Span("\ud7ff", "\ue000")),
        ("\U0010ffff", Span("\U0010ffff", None)),
        ("a\U0010ffff\U0010ffff", Span("a\U0010ffff\U0010ffff", "b")),
    ],
)
def test_a_prefix_has_an_upper_end_where_one_can_be(prefix: str, span: Span) -> None:
    assert prefix_span(prefix) == span


@thorough
@given(keys, keys)
def test_a_pattern_is_a_prefix_or_one_key(pattern: str, key: str) -> None:
    matches = key.startswith(pattern[:-1]) if pattern.endswith("*") else key == pattern

    assert (key in pattern_span(pattern)) == matches


@thorough
@given(keys, keys)
def test_the_span_of_a_key_holds_that_key_alone(key: str, other: str) -> None:
    assert (other in key_span(key)) == (other == key)
    assert key + other not in key_span(key)


def test_a_star_is_every_key() -> None:
    assert pattern_span("*") == Span("", None)
    assert pattern_span("a**") == prefix_span("a*")
    assert "a" in pattern_span("a")
    assert "a " not in pattern_span("a")


@pytest.mark.parametrize("pattern", ["", "\0", "a\0*", "\ud800*", 5, None, b"a*"])
def test_a_pattern_that_is_no_key_is_refused(pattern: Any) -> None:
    with pytest.raises(InvalidKey):
        pattern_span(pattern)


@pytest.mark.parametrize("prefix", ["\0", "\ud800", "a" * 1025, 5, None, b"a"])
def test_a_prefix_that_is_no_key_is_refused(prefix: Any) -> None:
    with pytest.raises(InvalidKey):
        prefix_span(prefix)


# Keys -------------------------------------------------------------------------


@thorough
@given(keys)
def test_a_key_stays_as_it_is(key: str) -> None:
    assert check_key(key) == key
    assert type(check_key(key)) is str


@pytest.mark.parametrize("key", ["a" * 1024, "é" * 512, "\U0010ffff" * 256, " ", "\n", "%_*?[./:'\"", "a\u0301"])
def test_a_key_is_up_to_1024_bytes_of_anything(key: str) -> None:
    assert check_key(key) is not None


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "it is empty"),
        ("a\0b", "U+0000 at position 1"),
        ("é\0", "U+0000 at position 1"),
        ("ab\ud800", "lone surrogate at position 2"),
        ("\udfff", "lone surrogate at position 0"),
        ("a" * 1025, "it is 1,025 bytes, limit 1,024"),
        ("é" * 513, "it is 1,026 bytes, limit 1,024"),
        (b"a", "a key is a str"),
        (None, "a key is a str"),
        (1, "a key is a str"),
        (["a"], "a key is a str"),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_a_message_names_what_is_wrong_with_a_key(key: Any, problem: str) -> None:
    with pytest.raises(InvalidKey) as refusal:
        check_key(key)

    assert str(refusal.value).endswith(problem)
    assert len(str(refusal.value)) < 300
    assert refusal.value.key == (key if isinstance(key, str) else None)


class Word(str, enum.Enum):  # noqa: UP042 - a StrEnum is another thing
    RED = "red"
    ROT = "röt"


class Loud(str):
    def __str__(self) -> str:
        return self.upper()


@pytest.mark.parametrize(("key", "plain"), [(Word.RED, "red"), (Word.ROT, "röt"), (Loud("low"), "low")])
def test_a_kind_of_str_is_the_text_that_it_is(key: str, plain: str) -> None:
    """Not what `str` makes of it, which for a member of a str Enum is its name."""
    assert check_key(key) == plain
    assert type(check_key(key)) is str


def test_the_limit_counts_bytes() -> None:
    assert KEY_BYTES_MAX == 1024
    assert len(check_key("é" * 512).encode()) == KEY_BYTES_MAX


# Namespaces -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "default", "0", "_", "-", "a-b_c9", "x" * 100])
def test_a_namespace_is_a_short_plain_word(name: str) -> None:
    assert check_namespace(name) == name


@pytest.mark.parametrize(
    "name", ["", "x" * 101, "A", "a b", "a\n", "a/b", "a.b", "é", "a\0", "\ud800", "٣", "%", None, 1, b"a", ["a"]]
)
def test_any_other_namespace_is_refused(name: Any) -> None:
    with pytest.raises(InvalidNamespace):
        check_namespace(name)


# Spans ------------------------------------------------------------------------


@thorough
@given(keys, keys, st.none() | keys)
def test_a_span_holds_its_start_and_not_its_stop(key: str, start: str, stop: str | None) -> None:
    span = Span(start, stop)

    assert (key in span) == (start <= key and (stop is None or key < stop))
