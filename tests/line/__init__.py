"""The wrapped optimizer without another change to the script: what it reads, adds, accepts and refuses."""
