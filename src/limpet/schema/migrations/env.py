"""Alembic runs this for every migration, with the connection or the buffer that `limpet.schema.migrate` gives it."""

from __future__ import annotations

from alembic import context

# `limpet.schema.migrate` has begun the transaction, or wants none in the script.
context.configure(**context.config.attributes["options"])
context.run_migrations()
