"""``python -m benchmarks [options]`` measures; ``table FILE`` prints, ``plot FILE`` draws what was measured."""

from __future__ import annotations

import sys

from benchmarks import plot, run, table

COMMANDS = {"table": table.main, "plot": plot.main}

if sys.argv[1:2] and sys.argv[1] in COMMANDS:
    COMMANDS[sys.argv[1]](sys.argv[2:])
else:
    run.main(sys.argv[1:])
