"""What a loss says through its gradient of the logits: the loss scale, the labels, the class dimension."""
