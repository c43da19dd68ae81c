"""Stores for frameworks that define their own interface, one module for each.

A module imports its framework, and nothing else imports the module: ``pip install 'limpet[keyvalue]'``, then
``from limpet.adapters.keyvalue import KeyValue``.
"""
