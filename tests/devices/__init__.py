"""What runs on an accelerator, and what the wrapper costs beside the mathematics."""
