"""JetStream's engine interface and its gRPC server; the extra jetstream."""
