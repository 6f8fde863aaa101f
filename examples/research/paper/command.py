"""The command line of ``python -m examples.paper``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from examples.research.arguments import Parser, add_device, number
from examples.research.paper import runs, smoke, tables
from examples.research.paper.listing import overview, rows_of
from examples.research.paper.recipes import SETTINGS, Recipe
from examples.research.paper.rows import select
from examples.research.paper.session import Session, connected

PROGRAM = "python -m examples.paper"
DESCRIPTION = "Train the rows of a table of the paper and print it with the paper's numbers beside ours."
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
SMALL = 2  # images a step of a smoke test on a CPU


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(prog=PROGRAM, description=DESCRIPTION, epilog=f"`{PROGRAM}` alone names the tables.")
    made.add_argument("table", nargs="?", choices=tables.NAMES, metavar="TABLE", help=", ".join(tables.NAMES))
    made.add_argument("row", nargs="*", metavar="ROW", help="its rows, or how their names begin (default: all)")
    made.add_argument("--list", action="store_true", help="show rows, settings and the paper's numbers")
    made.add_argument("--hours", action="store_true", help="--list, with the time of a seed here, from timed steps")
    made.add_argument("--smoke", action="store_true", help="train and measure two steps of each row, on your data")
    made.add_argument("--seeds", type=number(int, 1), default=3, help="runs of each row (default 3)")
    made.add_argument("--epochs", type=number(int, 1), help="of all rows (default: the paper's)")
    made.add_argument("--batch-size", type=number(int, 1), help="of all rows and processes together (the paper's)")
    made.add_argument("--settings", choices=tuple(SETTINGS), default="paper", help="of DCL and DCP (default paper)")
    made.add_argument("--augmentation", choices=("authors",), help="what the authors' code does on small images")
    add_device(made)
    made.add_argument("--precision", choices=tuple(PRECISIONS), default="fp32", help="(default fp32)")
    made.add_argument(
        "--workers", type=number(int, 0), help="processes that load images (default: the cores, up to 16)"
    )
    made.add_argument("--data-root", type=Path, default=Path("runs/data"), help="of the data sets (default runs/data)")
    out = Path("runs/reproduce")
    made.add_argument("--out", type=Path, default=out, help=f"of checkpoints and results (default {out})")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    made = parser()
    options = made.parse_args(arguments)
    if options.table is None and not (options.list or options.hours or options.smoke):
        print(overview())
        return
    session = connected(
        partial(Session, data=options.data_root, out=options.out, workers=_workers(options)), options.device
    )
    batch = options.batch_size or (SMALL if options.smoke and session.device.type == "cpu" else None)
    recipe = Recipe(options.settings, options.augmentation, options.epochs, batch, PRECISIONS[options.precision])
    known = tables.build(recipe)
    try:
        chosen = {
            name: select(table, options.row, known) for name, table in known.items() if options.table in (None, name)
        }
        if options.smoke:
            sys.exit(smoke.run(chosen, session))
        elif not (options.list or options.hours):
            runs.run(known[options.table], chosen[options.table], options.seeds, session, recipe.changes())
        elif session.first:
            print(rows_of(known, chosen, session if options.hours else None))
    except (ValueError, ImportError) as error:
        if session.first:
            print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("interrupted before the first step")
    finally:
        session.leave()


def _workers(options: argparse.Namespace) -> int:
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(min(16, cores)) if options.workers is None else int(options.workers)
