"""DCL's companion network: how it is made, what it sees, what it learns."""
