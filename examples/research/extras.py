"""What to install where a package is missing, in one line."""

from __future__ import annotations

import sys
from types import TracebackType

# The groups of pyproject.toml that bring a package beside the extra demo, by the name that it is imported by.
GROUPS = {
    **dict.fromkeys(("matplotlib", "scipy", "sklearn", "tqdm"), ""),
    **dict.fromkeys(("fontTools", "PIL", "timm", "torchvision"), "research"),
    "transformers": "integrations",
}


def explain(error: BaseException) -> str | None:
    """Say what to install for an import that failed; None for any other error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package not in GROUPS:
        return None
    group = f" --group {GROUPS[package]}" if GROUPS[package] else ""
    return f"{error}; in the repository: pip install -e '.[demo]'{group}"


def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Be a ``sys.excepthook`` that shows a missing package without a traceback."""
    line = explain(error)
    if line is None:
        sys.__excepthook__(kind, error, traceback)
    else:
        print(f"error: {line}", file=sys.stderr)
