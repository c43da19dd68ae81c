"""The Redis engine."""
