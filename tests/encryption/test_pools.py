"""The state of a butler on its own pool, in a process that has encryption keys."""

from __future__ import annotations

import os
import uuid

import asyncpg
import pytest

from limpet.encryption.keyring import new_key
from limpet.faces.state import state_get, state_set
from limpet.urls import KEYS_VARIABLE


async def test_a_pool_is_encrypted_where_the_process_has_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, ":".join(new_key()))
    schema = f"butler_{uuid.uuid4().hex[:12]}"
    url = os.environ["LIMPET_TEST_POSTGRES"]
    async with asyncpg.create_pool(url, server_settings={"search_path": schema}, min_size=1) as pool:
        await pool.execute(f'CREATE SCHEMA "{schema}"')
        await state_set(pool, "token", {"secret": "t0p"})

        assert await state_get(pool, "token") == {"secret": "t0p"}
        rows = await pool.fetch(f'SELECT * FROM "{schema}".limpet_entries')

    assert [row["kind"] for row in rows] == ["bytes"]
    assert "t0p" not in str([tuple(row) for row in rows])
    assert b"t0p".hex() not in str([tuple(row) for row in rows])
