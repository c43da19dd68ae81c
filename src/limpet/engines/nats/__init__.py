"""The NATS JetStream engine."""
