"""``python -m benchmarks [options]`` measures; ``python -m benchmarks table FILE`` prints what was measured."""

from __future__ import annotations

import sys

from benchmarks import run, table

if sys.argv[1:2] == ["table"]:
    table.main(sys.argv[2:])
else:
    run.main(sys.argv[1:])
