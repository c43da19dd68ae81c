"""The engines, one file each. Nothing above `limpet.engine` imports from here."""
