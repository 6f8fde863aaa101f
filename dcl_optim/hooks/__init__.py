"""The hooks on the script's modules, and what they read: logits, losses, labels, the loss scale."""
