"""The benchmarks: Limpet and its peers side by side in one run. Start them with ``./dev bench``."""
