"""Keys, prefixes and pages of keys."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.errors import InvalidKey, InvalidValue

LAST = "\U0010ffff"

# One character for each length in UTF-8, and both sides of every boundary: between those lengths, around
# the surrogates, and where UTF-16 order differs from code-point order.
SEAMS = [
    "\x01",
    "\t",
    "\n",
    " ",
    "!",
    "%",
    "*",
    "/",
    "0",
    "9",
    ":",
    "A",
    "Z",
    "[",
    "_",
    "a",
    "z",
    "~",
    "\x7f",
    "\x80",
    "\u00e9",
    "\u07ff",
    "\u0800",
    "\ud7ff",
    "\ue000",
    "\ufffd",
    "\uffff",
    "\U00010000",
    "\U0001f600",
    "\U000effff",
    LAST,
]


async def drain(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def fill(store: limpet.Store, keys: Sequence[str]) -> None:
    """Put every key, each with itself as its value."""
    for start in range(0, len(keys), 128):
        batch = store.batch()
        for key in keys[start : start + 128]:
            batch = batch.put(key, key)
        await batch.commit()


async def all_pages(store: limpet.Store, prefix: str = "", *, limit: int) -> list[str]:
    """The keys of all pages, one page after the other."""
    found: list[str] = []
    page = await store.keys(prefix, limit=limit)
    while page.truncated:
        found += page.keys
        page = await store.keys(prefix, limit=limit, after=page.cursor)
    return found + page.keys


# The grammar ------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "k" * 1024,
        "\u00e9" * 512,
        "\u20ac" * 341 + "k",
        "\U0001f600" * 256,
        "\U0001f600" * 255 + "\u20ack",
        LAST * 256,
    ],
    ids=["1-byte", "2-byte", "3-byte", "4-byte", "mixed", "last"],
)
async def test_a_key_of_1024_bytes_is_kept(store: limpet.Store, key: str) -> None:
    """A key is 1 to 1024 bytes of UTF-8."""
    assert len(key.encode()) == 1024

    await store.put(key, "full length")

    assert await store.get(key) == "full length"
    assert (await store.keys()).keys == [key]
    assert [entry.key for entry in await drain(store.scan(key))] == [key]
    assert await store.take(key) == "full length"


@pytest.mark.refused_early
@pytest.mark.parametrize(
    "key",
    ["k" * 1025, "\u00e9" * 512 + "k", "k" + "\u00e9" * 512, "\u20ac" * 342, "\U0001f600" * 256 + "k", "k" * 1_000_000],
    ids=["1-byte", "2-byte", "2-byte-shifted", "3-byte", "4-byte", "huge"],
)
async def test_a_longer_key_is_refused(store: limpet.Store, key: str) -> None:
    """A key is 1 to 1024 bytes of UTF-8."""
    with pytest.raises(InvalidKey):
        await store.put(key, 1)
    with pytest.raises(InvalidKey):
        await store.get(key)

    assert (await store.status()).keys == 0


async def test_the_empty_key_is_refused(store: limpet.Store) -> None:
    """A key is 1 to 1024 bytes of UTF-8."""
    with pytest.raises(InvalidKey):
        await store.put("", 1)
    with pytest.raises(InvalidKey):
        await store.get("")


async def test_a_key_of_one_byte_is_kept(store: limpet.Store) -> None:
    """A key is 1 to 1024 bytes of UTF-8."""
    every = [chr(code) for code in range(1, 128)]

    await fill(store, every)

    assert (await store.keys()).keys == every
    assert [await store.get(key) for key in every] == every


async def test_long_keys_that_differ_at_their_end_are_two(store: limpet.Store) -> None:
    """A key is 1 to 1024 bytes of UTF-8.

    An engine that stores only the beginning of a key, or a short hash of it, would mix these up.
    """
    stem = "\u00e9" * 511
    await fill(store, [stem + "ab", stem + "ac", stem + "a", stem])

    assert (await store.keys()).keys == [stem, stem + "a", stem + "ab", stem + "ac"]
    assert await store.get(stem + "ac") == stem + "ac"


@pytest.mark.refused_early
@pytest.mark.parametrize("key", ["\0", "\0a", "a\0", "a\0b", "\u00e9\0"])
async def test_a_key_with_u0000_is_refused(store: limpet.Store, key: str) -> None:
    """A key holds no U+0000 and no lone surrogate."""
    with pytest.raises(InvalidKey):
        await store.put(key, 1)
    with pytest.raises(InvalidKey):
        await store.get(key)

    assert (await store.status()).keys == 0


SURROGATES = [chr(0xD800), chr(0xDBFF), chr(0xDC00), chr(0xDFFF), "a\ud83d", "\ude00\ud83d", "\ud83d" + "\ude00"]


@pytest.mark.refused_early
@pytest.mark.parametrize("key", SURROGATES, ids=ascii)
async def test_a_key_with_a_lone_surrogate_is_refused(store: limpet.Store, key: str) -> None:
    """A key holds no U+0000 and no lone surrogate.

    Two surrogates side by side are two lone ones to Python, and not the emoji they would be in UTF-16.
    """
    with pytest.raises(InvalidKey):
        await store.put(key, 1)
    with pytest.raises(InvalidKey):
        await store.entry(key)

    assert (await store.status()).keys == 0


async def test_the_neighbours_of_the_surrogates_are_letters(store: limpet.Store) -> None:
    """A key holds no U+0000 and no lone surrogate."""
    await fill(store, ["\x01", "\ud7ff", "\ue000"])

    assert (await store.keys()).keys == ["\x01", "\ud7ff", "\ue000"]


async def read_watch(store: Any, pattern: Any) -> None:
    async with store.watch(pattern):
        pass


Road = Callable[[Any, Any], Awaitable[object]]

ROADS: dict[str, Road] = {
    "get": lambda store, key: store.get(key),
    "entry": lambda store, key: store.entry(key),
    "put": lambda store, key: store.put(key, 1),
    "create": lambda store, key: store.create(key, 1),
    "update": lambda store, key: store.update(key, lambda value: 1),
    "add": lambda store, key: store.add(key),
    "delete": lambda store, key: store.delete(key),
    "take": lambda store, key: store.take(key),
    "touch": lambda store, key: store.touch(key, 5),
    "persist": lambda store, key: store.persist(key),
    "expect": lambda store, key: store.batch().expect(key, limpet.ABSENT).commit(),
    "batch.put": lambda store, key: store.batch().put(key, 1).commit(),
    "batch.add": lambda store, key: store.batch().add(key).commit(),
    "batch.set": lambda store, key: store.batch().set(key, {"f": 1}).commit(),
    "batch.swap": lambda store, key: store.batch().swap(key, "f", 1, 2).commit(),
    "batch.touch": lambda store, key: store.batch().touch(key, 5).commit(),
    "batch.delete": lambda store, key: store.batch().delete(key).commit(),
    "batch.take": lambda store, key: store.batch().take(key).commit(),
    "record": lambda store, key: store.record(key).set(f=1),
    "field": lambda store, key: store.record("r").set({key: 1}),
    "unset": lambda store, key: store.record("r").set(unset=(key,)),
    "lock": lambda store, key: store.lock(key, ttl=5).acquire(),
    "history": lambda store, key: drain(store.history(key)),
    "watch": read_watch,
    "keys after": lambda store, key: store.keys(after=key),
    "scan after": lambda store, key: drain(store.scan(after=key)),
    "outcome": lambda store, key: store.outcome(key),
    "request_id": lambda store, key: store.put("k", 1, request_id=key),
}
PREFIX_ROADS: dict[str, Road] = {
    "keys": lambda store, key: store.keys(key),
    "scan": lambda store, key: drain(store.scan(key)),
    "locks": lambda store, key: store.locks(key),
}
ALL_ROADS = {**ROADS, **PREFIX_ROADS}


@pytest.mark.refused_early
@pytest.mark.parametrize("road", ALL_ROADS)
async def test_a_key_that_is_not_a_str_is_refused(store: limpet.Store, road: str) -> None:
    """A key that is not a str is InvalidKey, not a crash."""
    for key in (5, 1.5, True, b"k", ("k",), limpet.ABSENT):
        with pytest.raises(InvalidKey):
            await ALL_ROADS[road](store, key)

    assert (await store.status()).revision == 0


async def test_none_is_no_key(store: limpet.Store) -> None:
    """A key that is not a str is InvalidKey, not a crash."""
    for road in ("get", "entry", "put", "update", "add", "delete", "take", "touch", "record", "history", "watch"):
        with pytest.raises(InvalidKey):
            await ROADS[road](store, None)


async def test_a_key_that_cannot_be_hashed_is_refused(store: limpet.Store) -> None:
    """A key that is not a str is InvalidKey, not a crash."""
    for key in (["k"], {"k": 1}, bytearray(b"k")):
        for road in ("get", "put", "delete", "keys", "batch.put", "expect", "lock", "outcome"):
            with pytest.raises(InvalidKey):
                await ALL_ROADS[road](store, key)


@pytest.mark.refused_early
@pytest.mark.parametrize("road", ROADS)
async def test_no_verb_lets_a_bad_key_in(store: limpet.Store, road: str) -> None:
    """A key holds no U+0000 and no lone surrogate."""
    for key in ("", "a\0b", "\ud800", "k" * 1025):
        with pytest.raises(InvalidKey):
            await ROADS[road](store, key)

    assert (await store.status()).revision == 0


@pytest.mark.refused_early
@pytest.mark.parametrize("road", PREFIX_ROADS)
async def test_no_verb_lets_a_bad_prefix_in(store: limpet.Store, road: str) -> None:
    """A key holds no U+0000 and no lone surrogate."""
    for prefix in ("a\0b", "\ud800", "k" * 1025):
        with pytest.raises(InvalidKey):
            await PREFIX_ROADS[road](store, prefix)


async def test_a_kind_of_str_is_a_key(store: limpet.Store) -> None:
    """A key that is not a str is InvalidKey, not a crash.

    A subclass of str is a key too. It comes back as a plain str.
    """

    class Name(str):
        __slots__ = ()

    written = await store.put(Name("caf\u00e9"), 1)

    assert await store.get("caf\u00e9") == 1
    found = await store.keys()
    assert found.keys == ["caf\u00e9"]
    assert {type(key) for key in (written.key, *found.keys)} == {str}


@pytest.mark.refused_early
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", "empty"),
        ("ab\0", r"U\+0000 at position 2"),
        ("abc\ud800", "surrogate at position 3"),
        ("k" * 1025, r"1,025 bytes.*1,024"),
        ("\u20ac" * 342, r"1,026 bytes.*1,024"),
        (5, "int.*str"),
        (b"k", "bytes.*str"),
        (None, "NoneType.*str"),
    ],
    ids=["empty", "zero", "surrogate", "long", "long-wide", "int", "bytes", "none"],
)
async def test_invalid_key_says_what_is_wrong(store: limpet.Store, key: Any, said: str) -> None:
    """The message of InvalidKey names what is wrong with the key."""
    with pytest.raises(InvalidKey, match=said) as raised:
        await store.get(key)

    assert raised.value.code == "invalid_key"
    assert raised.value.key == (key if isinstance(key, str) else None)


async def test_the_message_of_invalid_key_can_be_printed(store: limpet.Store) -> None:
    """The message of InvalidKey names what is wrong with the key.

    A key that UTF-8 cannot carry must not break the log it is reported in, nor flood it.
    """
    for key in ("\ud800", "a\0b", "\ud800" * 100_000, "k" * 1_000_000, "\n" * 2000):
        with pytest.raises(InvalidKey) as raised:
            await store.get(key)

        said = str(raised.value).encode()
        assert len(said) < 300
        assert b"\n" not in said
        assert b"\0" not in said


# Letters ----------------------------------------------------------------------


async def test_signs_are_letters(store: limpet.Store) -> None:
    """No other character has meaning: `%`, `_`, `*`, `?`, `[`, `.`, `/`, `:`, spaces, quotes and newlines are letters.

    Each sign is between two letters, where a pattern would match the other keys.
    """
    signs = [chr(code) for code in range(1, 128) if not chr(code).isalnum()]
    await fill(store, [f"a{sign}b" for sign in signs])

    for sign in signs:
        key = f"a{sign}b"
        assert await store.get(key) == key
        assert (await store.keys(key)).keys == [key]
        assert (await store.keys(f"a{sign}")).keys == [key]


async def test_patterns_of_other_systems_are_letters(store: limpet.Store) -> None:
    """No other character has meaning: `%`, `_`, `*`, `?`, `[`, `.`, `/`, `:`, spaces, quotes and newlines are letters.

    What LIKE, GLOB, regular expressions and subjects would expand stands for itself, as key and as prefix.
    """
    patterns = ["%", "a%", "a_c", "*", "a*", "a?c", "a[bc]c", "[!a]*", "a.*", ">", "a.>", "*.c", "^a", "a$", "a{1,2}"]
    plain = ["abc", "acc", "a.c", "aXc", "a.b.c", "aa"]
    await fill(store, patterns + plain)

    for pattern in patterns:
        expected = sorted(key for key in patterns + plain if key.startswith(pattern))
        assert (await store.keys(pattern)).keys == expected
        assert await store.delete(pattern) is True
        assert await store.delete(pattern) is False

    assert (await store.keys()).keys == sorted(plain)


@pytest.mark.parametrize(
    "key",
    [
        "' OR 1=1 --",
        '"; DROP TABLE limpet_entries; --',
        "') ON CONFLICT DO NOTHING; --",
        "?1",
        ":key",
        "$1",
        "@key",
        "%s",
        "%(key)s",
        "{}",
        "{0}",
        "{tag}key",
        "\\x00",
        "\\0",
        "\\u0000",
        "\\",
        "NULL",
        "null",
        "true",
        "1",
        "1e3",
        "KEYS[1]",
        "\r\nFLUSHALL\r\n",
        "$KV.bucket.key",
        "../../etc/passwd",
        "/",
        "//",
        ".",
        "..",
    ],
)
async def test_what_is_code_elsewhere_is_a_key_here(store: limpet.Store, key: str) -> None:
    """No other character has meaning: `%`, `_`, `*`, `?`, `[`, `.`, `/`, `:`, spaces, quotes and newlines are letters.

    Each is a statement, a placeholder, a literal or a path for some driver.
    """
    bystander = await store.put("bystander", 1)

    written = await store.put(key, "code")

    assert written.key == key
    assert await store.entry(key) == written
    assert (await store.keys(key)).keys == [key]
    assert [event.key for event in await drain(store.history(key))] == [key]
    assert await store.delete(key) is True
    assert await store.entry("bystander") == bystander
    assert (await store.keys()).keys == ["bystander"]


async def test_spaces_at_the_edges_count(store: limpet.Store) -> None:
    """No other character has meaning: `%`, `_`, `*`, `?`, `[`, `.`, `/`, `:`, spaces, quotes and newlines are letters.

    Nothing is stripped, padded or folded: a blank at the edge makes another key.
    """
    blanks = [" ", "\t", "\n", "\r", "\r\n", "\x0b", "\x85", "\u00a0", "\u2028", "\u200b", "\u3000", "\ufeff"]
    keys = ["k", *(f"k{blank}" for blank in blanks), *(f"{blank}k" for blank in blanks), *blanks]

    await fill(store, keys)

    assert (await store.keys()).keys == sorted(keys)
    assert [await store.get(key) for key in keys] == keys


async def test_a_star_at_the_end_is_a_letter_to_history(store: limpet.Store) -> None:
    """No other character has meaning: `%`, `_`, `*`, `?`, `[`, `.`, `/`, `:`, spaces, quotes and newlines are letters.

    Only a watch reads it as a pattern.
    """
    for key in ("a", "a*", "a*b", "ab"):
        await store.put(key, key)

    assert [event.value for event in await drain(store.history("a*"))] == ["a*"]
    assert [event.value for event in await drain(store.history("a"))] == ["a"]


async def test_two_spellings_of_a_letter_are_two_keys(store: limpet.Store) -> None:
    """There is no Unicode normalisation: two spellings of é are two keys."""
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert unicodedata.normalize("NFC", decomposed) == composed

    await store.put(composed, 1)
    assert await store.get(decomposed) is None
    await store.put(decomposed, 2)

    assert [await store.get(composed), await store.get(decomposed)] == [1, 2]
    assert (await store.keys("caf")).keys == [decomposed, composed]
    assert (await store.keys("cafe")).keys == [decomposed]


async def test_compatible_characters_are_different_keys(store: limpet.Store) -> None:
    """There is no Unicode normalisation: two spellings of é are two keys."""
    rings, ligatures, numbers = ["\u00c5", "\u212b", "A\u030a"], ["\ufb01", "fi"], ["\u2460", "1", "\u00bd", "1\u20442"]
    keys = [*rings, *ligatures, *numbers, "\uac00", "\u1100\u1161"]

    await fill(store, keys)

    assert (await store.keys()).keys == sorted(keys)
    assert [await store.get(key) for key in keys] == keys


async def test_upper_and_lower_case_are_two_keys(store: limpet.Store) -> None:
    """Upper and lower case are two keys."""
    await store.put("Key", "upper")
    assert await store.get("key") is None
    await store.put("key", "lower")

    assert await store.get("Key") == "upper"
    assert (await store.keys("K")).keys == ["Key"]
    assert await store.delete("KEY") is False
    assert (await store.keys()).keys == ["Key", "key"]


async def test_case_beyond_ascii_makes_different_keys(store: limpet.Store) -> None:
    """Upper and lower case are two keys."""
    accents, sharps, sigmas = ["\u00e9", "\u00c9"], ["\u00df", "ss", "SS", "\u1e9e"], ["\u03c3", "\u03c2", "\u03a3"]
    keys = [*accents, *sharps, *sigmas, "i", "I", "\u0130", "\u0131"]

    await fill(store, keys)

    assert (await store.keys()).keys == sorted(keys)
    assert [await store.get(key) for key in keys] == keys


# Order ------------------------------------------------------------------------


async def test_keys_come_in_code_point_order(store: limpet.Store) -> None:
    """Order is code-point order."""
    shuffled = random.Random(7).sample(SEAMS, len(SEAMS))
    await fill(store, shuffled)

    assert (await store.keys()).keys == SEAMS
    assert [entry.key for entry in await drain(store.scan())] == SEAMS


async def test_an_emoji_comes_after_the_last_of_the_first_plane(store: limpet.Store) -> None:
    """Order is code-point order.

    In UTF-16 an emoji starts with a surrogate and would come before U+E000.
    """
    for key in ("\U0001f600", "\uffff", "\ue000", "\ud7ff"):
        await store.put(f"k/{key}", 1)

    assert (await store.keys("k/")).keys == ["k/\ud7ff", "k/\ue000", "k/\uffff", "k/\U0001f600"]


async def test_a_key_comes_before_those_that_go_on_from_it(store: limpet.Store) -> None:
    """Order is code-point order."""
    ordered = ["a", "a\x01", "a ", "a/", "a/b", "a0", "aa", "a\u00e9", "a" + LAST, "b"]
    await fill(store, ordered[::-1])

    assert (await store.keys()).keys == ordered


async def test_order_knows_no_language(store: limpet.Store) -> None:
    """Order is code-point order.

    A database that sorts by locale puts these as a dictionary would, and leaves out the signs.
    """
    ordered = ["10", "9", "Z", "a", "a b", "a-b", "a_b", "ab", "b", "\u00c4", "\u00e4", "\u00f6"]
    await fill(store, ordered[::-1])

    assert (await store.keys()).keys == ordered


async def test_random_keys_come_in_code_point_order_page_by_page(store: limpet.Store) -> None:
    """Order is code-point order."""
    dice = random.Random(11)
    keys = list({"".join(dice.choices(SEAMS, k=dice.randint(1, 4))) for _ in range(300)})
    await fill(store, keys)

    assert await all_pages(store, limit=7) == sorted(keys)


# Prefixes ---------------------------------------------------------------------


async def test_a_prefix_matches_the_keys_that_start_with_it(store: limpet.Store) -> None:
    """A prefix matches exactly the keys that start with it."""
    await fill(store, ["user", "user/", "user/1", "user/2", "user0", "user-1", "use", "users", "USER/1", "a/user/1"])

    assert (await store.keys("user/")).keys == ["user/", "user/1", "user/2"]
    assert [entry.key for entry in await drain(store.scan("user/"))] == ["user/", "user/1", "user/2"]
    assert (await store.keys("user/1")).keys == ["user/1"]
    assert (await store.keys("user/1/")).keys == []


async def test_every_prefix_of_random_keys_matches_as_python_does(store: limpet.Store) -> None:
    """A prefix matches exactly the keys that start with it."""
    dice = random.Random(13)
    keys = sorted({"".join(dice.choices(SEAMS, k=dice.randint(1, 3))) for _ in range(250)})
    await fill(store, keys)

    for prefix in {key[:length] for key in dice.sample(keys, 60) for length in (1, 2)}:
        assert (await store.keys(prefix)).keys == [key for key in keys if key.startswith(prefix)]


@pytest.mark.parametrize("edge", SEAMS, ids=lambda edge: f"U+{ord(edge):04X}")
async def test_a_prefix_ends_where_its_last_character_does(store: limpet.Store, edge: str) -> None:
    """A prefix matches exactly the keys that start with it.

    Its upper end is another character: one with a longer encoding at the boundaries, and never a surrogate.
    """
    await fill(store, [f"p{seam}" for seam in SEAMS] + [f"p{edge}z", f"p{edge}{LAST}", f"p{edge}\x01", "p", "q"])

    assert (await store.keys(f"p{edge}")).keys == [f"p{edge}", f"p{edge}\x01", f"p{edge}z", f"p{edge}{LAST}"]


async def test_a_prefix_of_full_length_matches(store: limpet.Store) -> None:
    """A prefix matches exactly the keys that start with it."""
    stem = "\U0001f600" * 255
    await fill(store, [stem + "\ud7ffa", stem + "\ud7ffb", stem + "\ue000a", stem])

    assert (await store.keys(stem + "\ud7ffa")).keys == [stem + "\ud7ffa"]
    assert (await store.keys(stem + "\ud7ff")).keys == [stem + "\ud7ffa", stem + "\ud7ffb"]
    assert (await store.keys(stem)).count == 4


async def test_a_prefix_that_ends_in_the_last_code_point_ends(store: limpet.Store) -> None:
    """A prefix that ends in the last code point still has an upper end."""
    matching = [f"a{LAST}", f"a{LAST}\x01", f"a{LAST}{LAST}"]
    await fill(store, [*matching, "a", "a\U0010fffe", "b", f"b{LAST}"])

    assert (await store.keys(f"a{LAST}")).keys == matching
    assert (await store.keys(f"a{LAST}{LAST}")).keys == [f"a{LAST}{LAST}"]
    assert [entry.key for entry in await drain(store.scan(f"a{LAST}"))] == matching


async def test_a_prefix_of_nothing_but_the_last_code_point_matches(store: limpet.Store) -> None:
    """A prefix that ends in the last code point still has an upper end.

    Nothing sorts after it, so here the end is the end of all keys.
    """
    await fill(store, ["a", "\uffff", "\U0010fffe", LAST, f"{LAST}a", LAST * 2, LAST * 256])

    assert (await store.keys(LAST)).keys == [LAST, f"{LAST}a", LAST * 2, LAST * 256]
    assert (await store.keys(LAST * 2)).keys == [LAST * 2, LAST * 256]
    assert (await store.keys(LAST * 256)).keys == [LAST * 256]


async def test_the_upper_end_steps_over_the_surrogates(store: limpet.Store) -> None:
    """A prefix that ends in the last code point still has an upper end.

    After U+D7FF, which may stand before a run of last code points, comes U+E000.
    """
    await fill(store, [f"\ud7ff{LAST}", f"\ud7ff{LAST}a", "\ud7ff", "\ue000", "\U00010000"])

    assert (await store.keys(f"\ud7ff{LAST}")).keys == [f"\ud7ff{LAST}", f"\ud7ff{LAST}a"]
    assert (await store.keys("\ud7ff")).keys == ["\ud7ff", f"\ud7ff{LAST}", f"\ud7ff{LAST}a"]


async def test_the_empty_prefix_matches_every_key(store: limpet.Store) -> None:
    """The empty prefix matches every key."""
    keys = sorted([*SEAMS, LAST * 256, "k" * 1024])
    await fill(store, keys)

    assert (await store.keys("")).keys == keys
    assert (await store.keys()).keys == keys
    assert [entry.key for entry in await drain(store.scan(""))] == keys


async def test_the_empty_prefix_of_an_empty_namespace_matches_nothing(store: limpet.Store) -> None:
    """The empty prefix matches every key."""
    assert (await store.keys()).keys == []
    assert await drain(store.scan()) == []


# Pages ------------------------------------------------------------------------


async def test_a_page_says_that_more_follows(store: limpet.Store) -> None:
    """A page of keys has its count, whether more follow, and the key to continue after."""
    await fill(store, ["a", "b", "c", "d", "e"])

    page = await store.keys(limit=2)

    assert (page.keys, page.count, page.truncated, page.cursor) == (["a", "b"], 2, True, "b")
    page = await store.keys(limit=2, after=page.cursor)
    assert (page.keys, page.count, page.truncated, page.cursor) == (["c", "d"], 2, True, "d")
    page = await store.keys(limit=2, after=page.cursor)
    assert (page.keys, page.count, page.truncated, page.cursor) == (["e"], 1, False, None)


async def test_a_full_last_page_says_that_nothing_follows(store: limpet.Store) -> None:
    """A page of keys has its count, whether more follow, and the key to continue after."""
    await fill(store, ["k/a", "k/b", "k/c", "l/a"])

    page = await store.keys("k/", limit=3)

    assert (page.keys, page.count, page.truncated, page.cursor) == (["k/a", "k/b", "k/c"], 3, False, None)


async def test_an_empty_page_says_that_nothing_follows(store: limpet.Store) -> None:
    """A page of keys has its count, whether more follow, and the key to continue after."""
    await store.put("other", 1)

    page = await store.keys("k/")

    assert (page.keys, page.count, page.truncated, page.cursor) == ([], 0, False, None)


async def test_what_has_expired_takes_no_place_on_a_page(store: limpet.Store, elapse: Elapse) -> None:
    """A page of keys has its count, whether more follow, and the key to continue after."""
    for number in range(9):
        await store.put(f"k/{number}", number, ttl=0.1 if number % 3 else None)
    await elapse(0.2)

    page = await store.keys("k/", limit=3)

    assert (page.keys, page.truncated, page.cursor) == (["k/0", "k/3", "k/6"], False, None)
    assert (await store.keys("k/", limit=2)).truncated is True


async def test_pages_of_any_size_give_every_key_once(store: limpet.Store) -> None:
    """Pages continue after the last key seen, whatever is written in between."""
    keys = [f"k/{number:02}" for number in range(23)]
    await fill(store, [*keys, "j", "l"])

    for limit in (1, 2, 5, 22, 23, 24):
        assert await all_pages(store, "k/", limit=limit) == keys


async def test_pages_go_on_over_inserts_and_deletes(store: limpet.Store, open_store: OpenStore) -> None:
    """Pages continue after the last key seen, whatever is written in between.

    Pages that count from the start would repeat a key after the insert and skip one after the delete.
    """
    other = await open_store()
    await fill(store, ["b", "d", "f", "h", "j"])
    first = await store.keys(limit=2)
    assert first.keys == ["b", "d"]

    for key in ("a", "c", "e", "k"):
        await other.put(key, key)
    for key in ("b", "f"):
        await other.delete(key)

    rest = await store.keys(limit=10, after=first.cursor)
    assert rest.keys == ["e", "h", "j", "k"]


async def test_pages_neither_miss_nor_repeat_while_others_write(store: limpet.Store, open_store: OpenStore) -> None:
    """Pages continue after the last key seen, whatever is written in between."""
    other = await open_store()
    standing = [f"k/{number:03}" for number in range(0, 100, 2)]
    await fill(store, standing)
    found: list[str] = []
    cursor: str | None = None
    for turn in range(100):
        page = await store.keys("k/", limit=3, after=cursor)
        found += page.keys
        if not page.truncated:
            break
        cursor = page.cursor
        await other.put(f"k/{(turn * 37) % 50 * 2 + 1:03}", turn)
        await other.delete(f"k/{(turn * 11) % 50 * 2 + 1:03}")
        await other.put(f"k/{(turn * 7) % 50 * 2:03}", "written again")

    assert found == sorted(set(found))
    assert [key for key in found if key in standing] == standing


async def test_a_cursor_may_name_a_deleted_key(store: limpet.Store) -> None:
    """A cursor may name a key that no longer exists."""
    await fill(store, ["a", "b", "c", "d"])
    page = await store.keys(limit=2)

    await store.delete("b")

    assert (await store.keys(after=page.cursor)).keys == ["c", "d"]


async def test_a_cursor_may_name_an_expired_key(store: limpet.Store, elapse: Elapse) -> None:
    """A cursor may name a key that no longer exists."""
    await fill(store, ["a", "c", "d"])
    await store.put("b", 1, ttl=0.5)
    page = await store.keys(limit=2)
    assert page.cursor == "b"

    await elapse(0.6)
    await store.sweep()

    assert (await store.keys(after=page.cursor)).keys == ["c", "d"]


async def test_a_cursor_may_name_a_key_that_never_was(store: limpet.Store) -> None:
    """A cursor may name a key that no longer exists."""
    await fill(store, ["j", "k/a", "k/c", "l"])

    assert (await store.keys(after="k/b")).keys == ["k/c", "l"]
    assert (await store.keys("k/", after="k/b")).keys == ["k/c"]
    assert (await store.keys("k/", after="a")).keys == ["k/a", "k/c"]
    assert (await store.keys("k/", after="k/c")).keys == []
    assert (await store.keys("k/", after="z")).keys == []
    assert (await store.keys("k/", after=LAST * 256)).keys == []


async def test_pages_go_on_after_keys_at_the_edges(store: limpet.Store) -> None:
    """Pages continue after the last key seen, whatever is written in between.

    The key after a cursor may be the cursor and one more character, the smallest there is.
    """
    keys = [f"{stem}{tail}" for stem in ("\x01", "a", "\ud7ff", "\ue000", LAST) for tail in ("", "\x01", "\x01\x01")]
    keys += ["a" * 1024, LAST * 256]
    await fill(store, keys)

    assert await all_pages(store, limit=1) == sorted(keys)


async def test_a_page_holds_a_thousand_keys_by_default(store: limpet.Store) -> None:
    """A page holds 1 to 10,000 keys, 1,000 by default."""
    keys = [f"k/{number:04}" for number in range(1001)]
    await fill(store, keys)

    page = await store.keys()

    assert (page.keys, page.truncated, page.cursor) == (keys[:1000], True, keys[999])
    assert (await store.keys(after=page.cursor)).keys == keys[1000:]


async def test_a_page_holds_as_many_keys_as_requested(store: limpet.Store) -> None:
    """A page holds 1 to 10,000 keys, 1,000 by default."""
    keys = [f"k/{number:05}" for number in range(10_001)]
    await fill(store, keys)

    whole, single = await store.keys(limit=10_000), await store.keys(limit=1)

    assert (whole.keys, whole.truncated, whole.cursor) == (keys[:-1], True, keys[-2])
    assert (single.keys, single.truncated, single.cursor) == (keys[:1], True, keys[0])


@pytest.mark.refused_early
@pytest.mark.parametrize("limit", [0, -1, 10_001, 2**63, True, 5.0, "5", None])
async def test_a_page_of_another_size_is_refused(store: limpet.Store, limit: Any) -> None:
    """A page holds 1 to 10,000 keys, 1,000 by default."""
    with pytest.raises(InvalidValue, match="10,000"):
        await store.keys(limit=limit)
