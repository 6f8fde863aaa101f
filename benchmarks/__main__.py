"""``python -m benchmarks``: the processes that :mod:`benchmarks.run` starts do not import this file."""

import sys

from benchmarks.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
