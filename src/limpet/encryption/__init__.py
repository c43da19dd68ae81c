"""Encryption of stored values: the keys, and an engine that encrypts in front of another."""
