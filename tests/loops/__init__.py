"""Training loops that scripts have: skipped steps, mixed precision, compile, checkpointing, schedulers, ranks."""
