"""Draw what healthy runs log, and one whose prototypes grow without limit, on scikit-learn's digits (about a minute).

python -m examples.research.logging_curves --out docs/images/logging.png

The network has batch norm, and a batch has three rows of a class. There DCP's prototypes grow without limit with
``update="batch"`` and alpha = 0.6, and do not with the default.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dcl_optim import DCLOptimizer, DCPOptimizer
from examples.research.arguments import Parser, number
from examples.research.canvas import new_figure, styles
from examples.research.idea import digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "DCP": (DCPOptimizer, {}),
    'DCP, update="batch", alpha=0.6': (DCPOptimizer, {"update": "batch", "alpha": 0.6}),
    "DCL": (DCLOptimizer, {}),
}
PANELS = {
    "dcl/penalty": "penalty, training batch",
    "dcl/agreement": "companion agreement, test images",
    "dcl/norm": "mean norm of the prototypes",
}
EVERY = 50  # steps


def train(kind: Any, settings: dict[str, Any], epochs: int) -> dict[str, list[tuple[float, float]]]:
    """Train, and give for each key its steps and values."""
    torch.manual_seed(0)
    x_train, y_train, x_test, _ = digits()
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True, drop_last=True)
    layers = (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4), model, **settings)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    curves = defaultdict(list)
    num_steps = 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            num_steps += 1
            if num_steps % EVERY:
                continue
            figures = optimizer.logs(prefix="dcl/")
            if isinstance(optimizer, DCPOptimizer):
                figures["dcl/norm"] = optimizer.prototypes.norm(dim=1).mean().item()
            else:
                model.eval()
                with torch.no_grad():
                    same = model(x_test).argmax(1) == optimizer.companion.eval()(x_test).argmax(1)
                model.train()
                figures["dcl/agreement"] = same.float().mean().item()
            for key in PANELS.keys() & figures.keys():
                curves[key].append((num_steps, figures[key]))
    return curves


def draw(runs: dict[str, dict[str, list[tuple[float, float]]]]) -> Figure:
    figure = new_figure(5.2, 7.5)  # one panel above the other: readable in the width of a phone
    for axes, (key, title) in zip(figure.subplots(len(PANELS), 1), PANELS.items(), strict=True):
        for name, style in styles(RUNS).items():
            if key in runs[name]:
                points = runs[name][key]
                drawn = style.of_points() | {"linestyle": style.line, "label": name}
                axes.plot(*zip(*points, strict=True), **drawn, markevery=max(1, len(points) // 8), markersize=4)
        axes.set(title=title, xlabel="step", yscale="linear" if key == "dcl/agreement" else "log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    lines = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    figure.legend(handles=[lines[name] for name in RUNS], loc="outside lower center", ncols=2, frameon=False)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=number(int, 2), default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/logging.png"))
    options = parser.parse_args(arguments)
    runs = {}
    for name, (kind, settings) in RUNS.items():
        runs[name] = train(kind, settings, options.epochs)
        for key, curve in runs[name].items():
            print(f"{name:30} {key:19} {' '.join(f'{value:.3g}' for _, value in curve[:: max(1, len(curve) // 8)])}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(runs).savefig(options.out)


if __name__ == "__main__":
    main()
