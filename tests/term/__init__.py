"""``optimizer.penalty(...)`` as a term of the script's own loss."""
