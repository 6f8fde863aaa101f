"""The paper's tables: train any row, and see its number beside the paper's.

    python -m examples.paper                                          # the tables
    python -m examples.paper main --list                              # the rows of one; --hours: their time here
    python -m examples.paper main --smoke --data-root DIR             # two steps of each row, on your data
    python -m examples.paper main cifar-100-resnet18 --data-root DIR  # CE, PT and DCL of ResNet-18 on CIFAR-100
    python -m examples.paper baselines cifar-100-resnet18/dcp --data-root DIR
    torchrun --nproc-per-node=8 -m examples.paper main --data-root DIR

docs/reproduce.md has the places of the data. The settings are the paper's.
"""

from __future__ import annotations

from examples.research.paper.command import main

if __name__ == "__main__":
    main()
