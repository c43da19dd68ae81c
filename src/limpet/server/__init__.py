"""The server: a store that other processes and other languages use, over NATS subjects and over HTTP."""
