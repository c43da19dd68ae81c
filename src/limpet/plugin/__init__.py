"""The client of plugins that reach the store through NATS subjects."""
