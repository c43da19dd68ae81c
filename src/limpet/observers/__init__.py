"""Observers of a store for monitoring systems, one a module. Each imports its system, and `limpet` imports none."""
