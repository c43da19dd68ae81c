"""The engines, and what several of them share. `limpet.urls` finds an engine by the scheme of its URL."""
