"""How every figure begins and ends, and the color, marker and line of each method."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Style(NamedTuple):
    """How a figure draws a method."""

    color: str
    marker: str
    line: str
    filled: bool = True

    def of_points(self) -> dict[str, Any]:
        """Return the keywords for matplotlib's ``plot`` and ``errorbar`` that draw points."""
        return {"color": self.color, "marker": self.marker, "markerfacecolor": self.color if self.filled else "white"}


# One color and marker for each method in all figures: Okabe and Ito's colors, which color-blind eyes can tell apart.
STYLES = {
    "plain": Style("#000000", "o", "-"),
    "DCP": Style("#D55E00", "s", "-"),
    "DCL": Style("#0072B2", "^", "--"),
    "label smoothing": Style("#009E73", "D", "-."),
    "EMA": Style("#CC79A7", "v", ":"),
    "SAM": Style("#E69F00", "P", "-."),
}
ALIASES = {"CE": "plain", "DCPOptimizer": "DCP", "DCLOptimizer": "DCL"}
OTHERS = (Style("#56B4E9", "X", "--"), Style("#666666", "*", "-."), Style("#8B4513", "p", ":"))
VARIANTS = (":", "-.", "--")


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Choose the style of each name in a figure.

    A name starts with its method. The second and later names of one method are its variants: they keep its color and
    marker, and get hollow markers and other lines. Names of unknown methods get the other styles in their order.

    Examples:
        >>> found = styles(["plain", "DCP", "DCP, λ = 0.1", "mine"])
        >>> found["DCP"]
        Style(color='#D55E00', marker='s', line='-', filled=True)
        >>> found["DCP, λ = 0.1"]
        Style(color='#D55E00', marker='s', line=':', filled=False)
        >>> found["mine"] == OTHERS[0]
        True
    """
    found: dict[str, Style] = {}
    seen: Counter[Style] = Counter()
    unknown = cycle(OTHERS)
    for name in names:
        style = _of_method(name) or next(unknown)
        variant = seen[style] - 1
        found[name] = style if variant < 0 else style._replace(line=VARIANTS[variant % len(VARIANTS)], filled=False)
        seen[style] += 1
    return found


def _of_method(name: str) -> Style | None:
    """Return the style of the method that the name starts with, if it is a known one."""
    for method in (*STYLES, *ALIASES):
        if re.match(rf"{re.escape(method)}\b", name):
            return STYLES[ALIASES.get(method, method)]
    return None


def new_figure(width: float, height: float) -> Figure:
    """Build an empty figure, sizes in inches, without pyplot and its global state; it is saved at 150 dots per inch.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "dcl-optim[trial]"') from error
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
