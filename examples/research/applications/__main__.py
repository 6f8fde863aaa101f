"""List the applications that can be run."""

from __future__ import annotations

from pathlib import Path

from examples.__main__ import commands

if __name__ == "__main__":
    print(*commands("examples.research.applications", Path(__file__).parent), sep="\n")
