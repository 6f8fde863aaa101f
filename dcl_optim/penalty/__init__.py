"""The penalty: distances of logits, their mean with its gradient by rows, and its weight."""
