"""How every figure begins and ends, and the colours, lines and markers of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for colour-blind eyes; the line styles do so in grey.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")


def new_figure(width: float, height: float) -> Figure:
    """Build an empty figure, sizes in inches, without pyplot and its global state; it is saved at 150 dots per inch.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "dcl-optim[plots]"') from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish(figure: Figure, title: str, handles: Sequence[Any], labels: Sequence[str]) -> Figure:
    """Set the title, and one legend below all panels, where it hides no data; without labels there is no legend."""
    figure.suptitle(title)
    if any(labels):
        inches = 0.6 + 0.08 * max(map(len, labels))  # about what the longest label takes with its line
        columns = max(1, int(figure.get_figwidth() / inches))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure
