"""Smaller interfaces over the store, for programs that already use them."""
