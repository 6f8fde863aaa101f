"""The packages beyond torch and numpy, which an extra brings."""

from __future__ import annotations

import importlib

__all__ = ["require"]


def require(extra: str, *packages: str) -> None:
    """Import packages, before a long work needs them.

    Raises:
        ImportError: one is missing; the message names the extra to install.
    """
    try:
        for name in packages:
            importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'{error}; this needs: pip install "dcl-optim[{extra}]"') from error
