"""What a loss says through its gradient of the logits: the factor on the loss, the labels, the class dimension."""
