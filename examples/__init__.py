"""Runnable examples; a package, so that another one of this name in the environment does not hide it."""

from __future__ import annotations

import sys

from examples.helpers import extras

if sys.argv[:1] == ["-m"]:  # which Python replaces by the script's path when it has imported its package, this one
    sys.excepthook = extras.show
