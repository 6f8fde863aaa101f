"""What ``import examples`` finds where a script is run as a file, whose folder comes first on the path: the package.

So ``python examples/NAME.py`` does what ``python -m examples.NAME`` does.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])
del sys.modules["examples"]
import_module("examples")
