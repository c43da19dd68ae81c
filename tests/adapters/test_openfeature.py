"""The provider for OpenFeature."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from openfeature import api
from openfeature.client import OpenFeatureClient
from openfeature.event import EventDetails, ProviderEvent
from openfeature.exception import ErrorCode, GeneralError
from openfeature.flag_evaluation import Reason
from openfeature.provider import ProviderStatus
from openfeature.provider.in_memory_provider import InMemoryFlag, InMemoryProvider

import limpet
from limpet.adapters.openfeature import Provider
from tests.engines import unique
from tests.servers import redis

Changes = queue.SimpleQueue[EventDetails]


@pytest.fixture
def namespace() -> Iterator[str]:
    """A namespace, and a provider of that name for OpenFeature, which is shut down at the end."""
    yield unique()
    api.shutdown()
    api.clear_providers()


@pytest.fixture
def changes() -> Iterator[Changes]:
    """The changes of flags that OpenFeature announces."""
    found: Changes = queue.SimpleQueue()
    api.add_handler(ProviderEvent.PROVIDER_CONFIGURATION_CHANGED, found.put)
    yield found
    api.remove_handler(ProviderEvent.PROVIDER_CONFIGURATION_CHANGED, found.put)


def client_of(provider: Any, domain: str) -> OpenFeatureClient:
    api.set_provider_and_wait(provider, domain)
    return api.get_client(domain)


def evaluate(client: OpenFeatureClient, name: str) -> list[Any]:
    """What all kinds of evaluation give for a flag."""
    found = [
        client.get_boolean_details(name, True),
        client.get_string_details(name, "none"),
        client.get_integer_details(name, -1),
        client.get_float_details(name, -1.5),
        client.get_object_details(name, {}),
    ]
    return [(each.value, type(each.value), each.error_code, each.reason, each.variant) for each in found]


def test_it_answers_as_the_provider_of_openfeature_does(url: str, namespace: str, changes: Changes) -> None:
    """The same random flags for both, each seen as soon as its change is announced."""
    dice = random.Random(17)
    flags: dict[str, InMemoryFlag[Any]] = {}
    with limpet.sync.open(url, namespace=namespace) as store:
        ours = client_of(Provider(url, namespace=namespace), namespace)
        for _ in range(15):
            name = dice.choice(["a", "b/c"])
            if name in flags and dice.random() < 0.3:
                store.delete(f"flags/{name}")
                del flags[name]
            else:
                value = dice.choice([True, False, "text", "", 5, 1.5, {"a": [1]}, [1, "b"]])
                store.put(f"flags/{name}", value, meta={"variant": "v"})
                flags[name] = InMemoryFlag("v", {"v": value})
            assert changes.get(timeout=10).flags_changed == [name]
            theirs = client_of(InMemoryProvider(flags), "theirs")
            for each in ("a", "b/c", "none"):
                # For the provider in memory, a boolean is a number, and an integer is not.
                mine, reference = evaluate(ours, each), evaluate(theirs, each)
                if each in flags and type(flags[each].variants["v"]) in (bool, int):
                    mine[2:4], reference[2:4] = [], []
                assert mine == reference, each


def test_an_integer_is_a_number_and_a_boolean_is_not(namespace: str) -> None:
    with limpet.sync.open(f"memory:{namespace}") as store:
        store.put("flags/five", 5)
        store.put("flags/on", True)
        client = client_of(Provider(f"memory:{namespace}"), namespace)

        assert evaluate(client, "five")[2:4] == [
            (5, int, None, Reason.STATIC, None),
            (5.0, float, None, Reason.STATIC, None),
        ]
        assert [found[2] for found in evaluate(client, "on")[2:4]] == [ErrorCode.TYPE_MISMATCH] * 2


async def test_it_works_in_a_coroutine_without_waiting_for_the_store(url: str, namespace: str) -> None:
    async with limpet.open(url, namespace=namespace) as store:
        await store.put("flags/dark", True)
        api.set_provider_and_wait(Provider(url, namespace=namespace), namespace)
        client = api.get_client(namespace)

        assert client.get_boolean_value("dark", False)
        assert await client.get_boolean_value_async("dark", False)
        assert client.get_boolean_details("dark", False).reason == Reason.STATIC


def test_errors_have_the_codes_of_openfeature(namespace: str) -> None:
    with limpet.sync.open(f"memory:{namespace}") as store:
        store.put("flags/text", "x")
        provider = Provider(f"memory:{namespace}")
        client = client_of(provider, namespace)

        assert client.get_boolean_details("none", True).error_code == ErrorCode.FLAG_NOT_FOUND
        assert client.get_boolean_details("text", True).error_code == ErrorCode.TYPE_MISMATCH
        assert client.get_integer_value("text", 7) == 7
        provider.shutdown()
        assert client.get_boolean_details("text", True).error_code == ErrorCode.PROVIDER_NOT_READY


def test_a_flag_that_expires_is_gone(namespace: str, changes: Changes) -> None:
    with limpet.sync.open(f"memory:{namespace}") as store:
        store.put("flags/sale", True, ttl=0.2)
        client = client_of(Provider(f"memory:{namespace}"), namespace)
        assert client.get_boolean_value("sale", False)

        assert changes.get(timeout=10).flags_changed == ["sale"]
        assert not client.get_boolean_value("sale", False)
        store.put("other", 1)
        store.put("flags/sale", True)
        assert changes.get(timeout=10).flags_changed == ["sale"]


def test_a_store_that_cannot_be_opened_is_an_error_at_once(namespace: str) -> None:
    with pytest.raises(GeneralError, match="unknown engine"):
        api.set_provider_and_wait(Provider("nothing://here"), namespace)
    assert api.get_client(namespace).get_provider_status() == ProviderStatus.ERROR


def test_while_the_store_is_away_flags_are_stale_and_then_they_are_new(
    namespace: str, changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limpet.adapters.openfeature.CHECK_S", 0.1)
    stale, ready = threading.Event(), threading.Event()
    with redis({"appendonly": "yes", "appendfsync": "always"}) as server, limpet.sync.open(server.url) as store:
        store.put("flags/dark", True)
        provider = Provider(server.url)
        client = client_of(provider, namespace)
        client.add_handler(ProviderEvent.PROVIDER_STALE, lambda _: stale.set())
        server.stop("immediate")
        assert stale.wait(60)
        found = client.get_boolean_details("dark", False)
        assert (found.value, found.reason) == (True, Reason.STALE)
        assert client.get_provider_status() == ProviderStatus.STALE

        client.add_handler(ProviderEvent.PROVIDER_READY, lambda _: ready.set())
        server.start()
        store.put("flags/dark", False)
        assert changes.get(timeout=60).flags_changed == ["dark"]
        assert ready.wait(60)
        assert client.get_boolean_details("dark", True).reason == Reason.STATIC
        provider.shutdown()


def test_shutting_down_ends_the_thread(namespace: str) -> None:
    provider = Provider(f"memory:{namespace}")
    client_of(provider, namespace)
    assert [thread.name for thread in threading.enumerate()].count("limpet-flags") == 1
    provider.shutdown()
    provider.shutdown()
    assert [thread.name for thread in threading.enumerate()].count("limpet-flags") == 0


def test_a_shutdown_that_comes_at_once_leaves_no_thread(namespace: str) -> None:
    """Before the flags are there, or just after."""
    for _ in range(10):
        provider = Provider(f"memory:{namespace}", timeout=0)
        with contextlib.suppress(GeneralError):
            provider.initialize(api.get_evaluation_context())
        provider.shutdown()
        assert [thread.name for thread in threading.enumerate()].count("limpet-flags") == 0


async def test_it_can_be_shut_down_in_a_coroutine(namespace: str) -> None:
    provider = Provider(f"memory:{namespace}")
    provider.initialize(api.get_evaluation_context())
    await asyncio.sleep(0)
    provider.shutdown()
