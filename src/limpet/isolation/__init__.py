"""Permissions of PostgreSQL, Redis and NATS that keep one namespace from reading or writing another."""
