"""Random losses, loops and trainings, others for each commit. ``python -m tests.adversary`` prints what was read."""

import os
import subprocess
from pathlib import Path


def seed_of_commit() -> int:
    """A number that each commit has of its own; ADVERSARY_SEED if it is set; a fixed one where there is no git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        commit = "29"
    return int(os.environ.get("ADVERSARY_SEED", int(commit[:8], 16)))


SEED = seed_of_commit()
