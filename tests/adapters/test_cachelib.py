"""The cache for cachelib."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from cachelib import BaseCache
from cachelib.serializers import JSONSerializer

import limpet
import limpet.sync
from limpet.adapters.cachelib import Cache
from tests.engines import unique


@pytest.fixture
def cache(url: str) -> Iterator[BaseCache]:
    """A cache on an engine, as an application knows it."""
    with Cache(url, namespace=unique()) as opened:
        yield opened


@pytest.mark.parametrize("value", [0, -5, 2**63 - 1, 2**63, 1.5, True, None, "x", b"x", b"\0", [1], {1: {2}}])
def test_a_value_comes_back_as_it_was(cache: BaseCache, value: Any) -> None:
    assert cache.set("k", value)

    assert cache.get("k") == value
    assert type(cache.get("k")) is type(value)
    assert cache.has("k")
    assert cache.get_dict("k", "none") == {"k": value, "none": None}


def test_a_key_may_be_any_text(cache: BaseCache) -> None:
    keys = ["", "a/b", "%", "~", "\0", "ä" * 2000, "x" * 5000]
    assert cache.set_many(dict(zip(keys, range(7), strict=True))) == keys

    assert cache.get_many(*keys) == list(range(7))
    assert cache.delete_many(*keys, "none") == [*keys, "none"]
    assert not any(cache.has(key) for key in keys)


def test_an_entry_expires(cache: BaseCache) -> None:
    cache.set("one", "x", timeout=1)
    cache.set("never", "x", timeout=0)
    cache.set("default", "x")
    cache.add("one too", "x", timeout=timedelta(milliseconds=200))  # cachelib rounds up to seconds
    assert cache.has("one too")

    time.sleep(1.1)
    assert cache.get_dict("one", "one too", "never", "default") == {
        "one": None,
        "one too": None,
        "never": "x",
        "default": "x",
    }
    assert cache.add("one", "new")


def test_of_many_threads_that_add_one_wins_and_every_increment_counts(cache: BaseCache) -> None:
    won: list[bool] = []

    def work() -> None:
        won.append(cache.add("once", "x"))
        for _ in range(5):
            cache.inc("count", 2)
            cache.dec("count")

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(won) == [False] * 9 + [True]
    assert cache.get("count") == 50


def test_clearing_leaves_other_keys_and_other_caches(url: str) -> None:
    with limpet.sync.open(url, namespace=unique()) as store:
        store.put("mine", 1)
        one, other = Cache(store), Cache(store, key_prefix="other/")
        one.set("k", 1)
        other.set("k", 2)

        assert one.clear()
        assert (one.get("k"), other.get("k"), store.get("mine")) == (None, 2, 1)
        one.close()
        assert store.get("mine") == 1


def test_what_cannot_be_cached_is_not_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with Cache("memory:") as cache:
        assert not cache.set("k", "x" * 1_000_001)
        assert "not cached" in caplog.text
        assert cache.get("k") is None


def test_another_serializer_can_be_set() -> None:
    class JsonCache(Cache):
        serializer = JSONSerializer()

    with limpet.sync.open("memory:") as store:
        cache = JsonCache(store)
        cache.set("k", {"a": [1]})
        assert cache.get("k") == {"a": [1]}
        assert store.get("cache/k") == b'{"a": [1]}'
        assert not cache.set("k", {1})
        assert cache.get("k") == {"a": [1]}


def test_closing_ends_what_a_url_has_opened() -> None:
    with Cache("memory:") as cache:
        cache.set("k", 1)
    with pytest.raises(limpet.errors.Closed):
        cache.get("k")


def test_a_wrong_store_or_prefix_is_refused() -> None:
    with pytest.raises(TypeError, match=r"limpet\.sync\.open"):
        Cache(5)  # type: ignore[arg-type]
    with pytest.raises(limpet.errors.InvalidKey):
        Cache("memory:", key_prefix="")
