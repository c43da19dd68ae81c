"""What Alembic runs for every migration: on the connection, or into the text, that `limpet.schema.migrate` hands it."""

from __future__ import annotations

from alembic import context

# Whoever called has begun the transaction, or wants none in the text.
context.configure(**context.config.attributes["options"])
context.run_migrations()
