"""``python -m benchmarks [options]`` measures; ``table FILE`` prints a results file, ``plot FILE`` draws it.

``kernels`` counts what a step launches, ``wide`` measures networks with many classes.
"""

from __future__ import annotations

import sys

from benchmarks import kernels, plot, run, table, wide

COMMANDS = {"table": table.main, "plot": plot.main, "kernels": kernels.main, "wide": wide.main}

if sys.argv[1:2] and sys.argv[1] in COMMANDS:
    COMMANDS[sys.argv[1]](sys.argv[2:])
else:
    run.main(sys.argv[1:])
