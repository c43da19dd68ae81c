"""Agents for tests: schemas and pools on a real server."""

from __future__ import annotations

import json
import uuid
from typing import Any

import asyncpg


class Pools:
    """Makes schemas, roles and pools, and takes them away again."""

    def __init__(self, url: str, admin: Any) -> None:
        self.url = url
        self.admin = admin
        self._schemas: list[str] = []
        self._roles: list[str] = []
        self._pools: list[Any] = []

    async def schema(self, name: str | None = None) -> str:
        """A new, empty schema."""
        name = name or f"agent_{uuid.uuid4().hex[:12]}"
        await self.admin.execute(f"CREATE SCHEMA {quoted(name)}")
        self._schemas.append(name)
        return name

    async def role(self, *schemas: str) -> str:
        """A new role that owns these schemas and may do nothing else."""
        name = f"role_{uuid.uuid4().hex[:12]}"
        await self.admin.execute(f"CREATE ROLE {name} LOGIN")
        self._roles.append(name)
        for schema in schemas:
            await self.admin.execute(f"ALTER SCHEMA {quoted(schema)} OWNER TO {name}")
        return name

    async def pool(self, schema: str | None = None, *, decodes: bool = False, **options: Any) -> Any:
        """A pool whose connections work in a schema; with ``decodes``, they turn JSON into objects by themselves."""
        settings = options.pop("server_settings", {})
        if schema is not None:
            settings = {"search_path": quoted(schema), **settings}
        options = {"min_size": 1, "max_size": 4, **options}
        if decodes:
            options["init"] = decode_json
        pool = await asyncpg.create_pool(self.url, server_settings=settings, **options)
        self._pools.append(pool)
        return pool

    async def close(self) -> None:
        for pool in self._pools:
            pool.terminate()
        for schema in self._schemas:
            await self.admin.execute(f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE")
        for role in self._roles:
            await self.admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def decode_json(connection: Any) -> None:
    """Decode JSON text to objects, as the manual of the driver advises."""
    for kind in ("json", "jsonb"):
        await connection.set_type_codec(kind, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def exactly(value: object) -> str:
    """A value as text that differs for 1, 1.0 and true, and for -0.0 and 0.0, and not for the order of members."""
    return json.dumps(value, sort_keys=True)
