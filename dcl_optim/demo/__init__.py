"""The demo, ``dcl-demo``: one small network trained with and without DCP and DCL on scikit-learn's digits.

Needs the extra ``demo``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import torch

from dcl_optim.demo.arguments import make_folder, parse, plan
from dcl_optim.demo.results import announce, present, save
from dcl_optim.demo.training import METHODS, Histories, train_seeds

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: 130 after Ctrl-C, 141 if the reader of a pipe has gone.

    Args:
        argv: the command line's arguments. Default: those of the process.

    Raises:
        SystemExit: an argument is wrong (code 2), or a package of the extra is missing.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     code = main(["--epochs", "1", "--seeds", "1", "--out", folder])
        digits: 50 training and 597 test images, 1 epochs, 1 seeds...curves.png.
        >>> code
        0
    """
    args = parse(argv)
    print(plan(args), end="", file=sys.stderr, flush=True)
    make_folder(args)
    print("dcl-demo: loading scikit-learn and matplotlib ...", file=sys.stderr)  # which takes seconds
    _require_extra()
    announce(args)
    histories, interrupted = _train(args)
    code = present(args, histories) if histories["plain"] else 0
    if interrupted:
        print(f"Interrupted: {len(histories['plain'])} of {args.seeds} seeds were finished.", file=sys.stderr)
    return 130 if interrupted else code


def _train(args: argparse.Namespace) -> tuple[Histories, bool]:
    """Train every seed, write results.json after each, and return the histories and whether Ctrl-C ended it."""
    histories: Histories = {method: [] for method in METHODS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors as small as these lose more to the threads' meeting than they gain
    try:
        for histories in train_seeds(args):  # after Ctrl-C these are the finished seeds
            save(args, histories, interrupted=False)
    except KeyboardInterrupt:
        if histories["plain"]:
            save(args, histories, interrupted=True)
        return histories, True
    finally:
        torch.set_num_threads(threads)
    return histories, False


def _require_extra() -> None:
    """Exit with a hint before the training, not after it, if a package of the extra is missing."""
    try:
        for name in ("sklearn.datasets", "tqdm", "matplotlib.figure"):
            importlib.import_module(name)
    except ImportError as error:
        sys.exit(f'dcl-demo: {error}; the demo needs: pip install "dcl-optim[demo]"')
