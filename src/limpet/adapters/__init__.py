"""Adapters: Limpet behind the interfaces of other frameworks."""
