"""The paper's tables and figures on data at hand: ``python -m examples.research``."""

from __future__ import annotations

import sys

from examples.research import extras

if sys.argv[:1] == ["-m"]:  # which Python replaces by the script's path when it has imported its package, this one
    sys.excepthook = extras.show
