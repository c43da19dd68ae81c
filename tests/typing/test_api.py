"""The typed walk through the public API runs, and leaves no verb out."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.encryption.keyring import Keyring
from tests.typing import api

KINDS: dict[type, tuple[Callable[[Any], Any], ...]] = {
    limpet.Store: (api.use_store, api.use_encrypted_store),
    limpet.Record: (api.use_record,),
    limpet.Draft: (api.use_draft,),
    limpet.Typed: (api.use_typed,),
    limpet.Lock: (api.use_lock,),
    limpet.Election: (api.use_election,),
    limpet.Watch: (api.use_watch,),
    limpet.sync.Store: (api.use_sync_store, api.use_sync_encrypted_store),
    limpet.sync.Record: (api.use_sync_record,),
    limpet.sync.Draft: (api.use_sync_draft,),
    limpet.sync.Typed: (api.use_sync_typed,),
    limpet.sync.Lock: (api.use_sync_lock,),
    limpet.sync.Election: (api.use_sync_election,),
    limpet.sync.Watch: (api.use_sync_watch,),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_public_verb_has_its_type_checked(kind: type) -> None:
    verbs = {name for name in dir(kind) if not name.startswith("_")}
    trees = [ast.parse(inspect.getsource(use)) for use in KINDS[kind]]
    used = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    assert verbs - used == set()


async def test_the_verbs_do_what_their_types_say() -> None:
    async with limpet.open("memory:", namespace="typed") as store:
        await api.use_store(store)
        await api.use_record(store.record("r"))
        await api.use_draft(store)
        await api.use_typed(store.typed(api.Point, "point/"))
        await api.use_lock(store.lock("l", ttl=10))
        await api.use_election(store.election("e", ttl=10))
        await api.use_watch(store)
    await api.use_encrypted_store(await limpet.open("memory:", encryption=Keyring({"k": os.urandom(32)})))


def test_the_verbs_of_the_sync_api_do_what_their_types_say(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    with limpet.sync.open(url, namespace="typed") as store:
        api.use_sync_store(store)
        api.use_sync_record(store.record("r"))
        api.use_sync_draft(store)
        api.use_sync_typed(store.typed(api.Point, "point/"))
        api.use_sync_lock(store.lock("l", ttl=10))
        api.use_sync_election(store.election("e", ttl=10))
        api.use_sync_watch(store)
    api.use_sync_encrypted_store(limpet.sync.open(url, encryption=Keyring({"k": os.urandom(32)})))
