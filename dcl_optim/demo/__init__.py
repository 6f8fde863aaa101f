"""The demo, ``dcl-demo``: a small network trained with and without DCP and DCL on scikit-learn's digits.

It is :func:`dcl_optim.trial.compare` of the script in ``dcl_optim/demo/digits.py``. Needs the extra ``demo``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from dcl_optim import __version__
from dcl_optim.demo.digits import COMPANION, METHODS, train
from dcl_optim.trial import compare
from dcl_optim.trial.command import report
from dcl_optim.trial.extra import require

__all__ = ["main"]

WHEN_IT_DIFFERS = (
    "On these digits label smoothing gains as much as DCP. With 150 classes and 5 images of each DCP gains\n"
    "4.1 ± 0.3 points more than label smoothing: docs/results/gains.md#other-images-in-every-seed"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: 130 after Ctrl-C.

    Args:
        argv: the command line's arguments. Default: those of the process.

    Raises:
        SystemExit: an argument is wrong, or a package of the extra is missing; with code 2.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     code = main(["--epochs", "1", "--seeds", "2", "--out", folder])
        digits: 50 training images, 1 epochs, 2 seeds...curves.png...
        >>> code
        0
    """
    parser = _make_parser()
    args = parser.parse_args(argv)
    epochs, seeds = (50, 5) if args.wrong_labels else (100, 10)
    parser.set_defaults(epochs=epochs, seeds=seeds)
    args = parser.parse_args(argv)
    if min(args.epochs, args.seeds) < 1 or not 0 <= args.wrong_labels <= 1:
        parser.error("--epochs and --seeds must be at least 1, and --wrong-labels between 0 and 1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors as small as these lose more to the threads' meeting than they gain
    try:
        return _run(args)
    except (ImportError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    finally:
        torch.set_num_threads(threads)


def _run(args: argparse.Namespace) -> int:
    require("demo", "sklearn.datasets")
    args.out.mkdir(parents=True, exist_ok=True)  # before the training, not after it
    methods = [*METHODS, COMPANION] if args.wrong_labels else METHODS
    size = 300 if args.wrong_labels else 50
    wrong = f" ({args.wrong_labels:.0%} wrong labels)" if args.wrong_labels else ""
    title = f"digits: {size} training images{wrong}, {args.epochs} epochs"
    print(f"{title}, {args.seeds} seeds", flush=True)
    script = functools.partial(train, train_size=size, epochs=args.epochs, wrong_labels=args.wrong_labels)
    found = compare(script, methods, args.seeds)
    code = report(found, args.out, f"{title}; test accuracy, %")
    if not args.wrong_labels:
        print(WHEN_IT_DIFFERS)
    print("Other data, other methods: docs/results.md; wrong labels: docs/noisy-labels.md")
    return code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcl-demo",
        description="Train a small network on scikit-learn's 8x8 digits with plain SGD, with label smoothing, with "
        "DCP and with DCL, from the same initial weights on the same batches; print a table and draw the curves. "
        "Takes about 75 seconds of CPU time. Ctrl-C stops early and reports the seeds that were finished.",
    )
    add = parser.add_argument
    add("--epochs", type=int, metavar="N", help="of each run (default: 100; 50 with wrong labels)")
    add("--seeds", type=int, metavar="N", help="runs of each method (default: 10; 5 with wrong labels)")
    wrong_help = "share of wrong training labels; on 300 images instead of 50, with the companion in a row (default: 0)"
    add("--wrong-labels", type=float, default=0.0, metavar="SHARE", help=wrong_help)
    add("--out", type=Path, default=Path("demo-out"), help="folder of the results (default: %(default)s)")
    add("--version", action="version", version=f"dcl-optim {__version__}")
    return parser
