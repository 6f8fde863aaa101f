"""Reading a results file for the table and for the image."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PARTS = ("methods", "knobs", "growth", "kernels", "wide")


def read(command: str, description: str | None, arguments: list[str]) -> tuple[Path, dict[str, Any]]:
    """Parse a command line that names a results file, and read it; what is none is an argparse error."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {command}", description=description)
    parser.add_argument("file", type=Path, help="a JSON file that python -m benchmarks wrote")
    path: Path = parser.parse_args(arguments).file
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"cannot read {path}: {error}")
    if not isinstance(results, dict) or not any(part in results for part in PARTS):
        parser.error(f"cannot read {path}: it has none of the parts {', '.join(PARTS)}; measure it anew")
    return path, results
