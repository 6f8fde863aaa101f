"""t-SNE of the logits: how far samples move between two epochs, how far classes lie apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dcl_optim.metrics import logit_drift
from dcl_optim.plots.canvas import MARKERS, finish, new_figure
from examples.paper.inputs import Logits, by_method, classes_shown, names_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Petroff's ten (arXiv 2107.02270), which stay apart for colour-blind eyes: scattered classes need more than six.
CLASS_COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
Points = np.ndarray[Any, Any]
Styles = Mapping[int, tuple[str, str]]
MOST, NAMED = 10, 20  # classes of class_embedding, as many as the paper's figure has; classes in the legend


def logit_embedding(
    before: Logits,
    after: Logits,
    labels: Tensor,
    class_names: Sequence[str] | None = None,
    *,
    epochs: tuple[str, str] = ("before", "after"),
    title: str | None = None,
) -> Figure:
    """Draw how far the same samples' logits move between two epochs, by a t-SNE of both epochs' logits together.

    A sample's hollow marker is its earlier logits, the filled one its later, and a line joins them. Each panel has a
    separate embedding: compare d, the :func:`~dcl_optim.metrics.logit_drift` in its title, not the lengths drawn.

    Args:
        before: logits at the earlier epoch, (N, K), N of at least 2; or such a tensor for each panel, by its title,
            such as method and stage of training. The paper draws 50 test samples.
        after: logits of the same samples at the later epoch, the same shapes and titles.
        labels: integer classes in 0..K-1, (N,). Of more than 20 classes the legend is left out.
        class_names: K names. Default: the classes' numbers.
        epochs: the names of the two epochs in the legend. Default: ``("before", "after")``.
        title: the line above all panels. Default: none.

    Returns:
        The figure; its ``savefig("drift.png")`` writes it, the suffix chooses the format (.png, .pdf, .svg).

    Raises:
        ValueError: the arguments are not those, or the logits are not finite or all the same.
        ImportError: matplotlib or scikit-learn is missing.

    Source: Figure 5, left.
    """
    earlier, _ = by_method("before", before, labels)
    later, labels = by_method("after", after, labels)
    if {name: z.shape for name, z in earlier.items()} != {name: z.shape for name, z in later.items()}:
        raise ValueError(
            f"before holds {_shapes(earlier)} and after holds {_shapes(later)}; they must hold the same titles and "
            "the same shapes"
        )
    names, styles = names_of(next(iter(later.values())).shape[1], class_names), _styles(labels.unique().tolist())
    figure, panels = _panels(len(later))
    for axes, panel in zip(panels, later, strict=True):
        places = _embed(panel, torch.cat([earlier[panel], later[panel]])).reshape(2, len(labels), 2)
        axes.plot(*places.transpose(2, 0, 1), color="0.6", linewidth=0.7, zorder=1)
        _scatter(axes, places[0], labels, styles, filled=False)
        _scatter(axes, places[1], labels, styles, filled=True)
        axes.set_title(", ".join(filter(None, [panel, f"d = {logit_drift(earlier[panel], later[panel]):.3g}"])))
    return _finish(figure, title, styles, names, epochs)


def class_embedding(
    logits: Logits,
    labels: Tensor,
    class_names: Sequence[str] | None = None,
    *,
    classes: Sequence[int] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw how far the classes lie apart in the space of logits, by a t-SNE of their samples' logits.

    Each method has a separate embedding: distances compare within a panel only.

    Args:
        logits: floating point, (N, K), N of at least 2; or such a tensor for each method. The paper takes test data.
            A t-SNE takes some seconds for 1000 samples.
        labels: integer classes in 0..K-1, (N,).
        class_names: K names. Default: the classes' numbers.
        classes: the classes shown. Default: all that have samples, or of more than 10 of them 10 at random, as in the
            paper, the same every time. Of more than 20 classes the legend is left out.
        title: the line above all panels. Default: none.

    Returns:
        The figure; its ``savefig("classes.png")`` writes it, the suffix chooses the format (.png, .pdf, .svg).

    Raises:
        ValueError: the arguments are not those, or the logits are not finite or all the same.
        ImportError: matplotlib or scikit-learn is missing.

    Source: Figure 6.
    """
    methods, labels = by_method("logits", logits, labels)
    count = next(iter(methods.values())).shape[1]
    names, shown = names_of(count, class_names), classes_shown(classes, labels, count, MOST)
    styles, chosen = _styles(shown), torch.isin(labels, torch.tensor(shown))
    figure, panels = _panels(len(methods))
    for axes, (method, values) in zip(panels, methods.items(), strict=True):
        _scatter(axes, _embed(method, values[chosen]), labels[chosen], styles, filled=True, edge="white")
        axes.set_title(method)
    return _finish(figure, title, styles, names, ())


def _embed(name: str, logits: Tensor) -> Points:
    """Place logits (N, K) in the plane, (N, 2), the same way every time."""
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError('a t-SNE needs scikit-learn: pip install "dcl-optim[paper]"') from error
    if not logits.isfinite().all() or not (logits != logits[0]).any():
        raise ValueError(
            f"logits{f' of {name}' if name else ''} of {len(logits)} samples are not finite or all the same; a t-SNE "
            "needs finite logits that differ"
        )
    tsne = TSNE(perplexity=min(30.0, (len(logits) - 1) / 3), init="pca", random_state=0)
    # Threads would add up in another order each time, and a t-SNE magnifies the last bits.
    with threadpool_limits(1):
        return np.asarray(tsne.fit_transform(logits.double().numpy()))


def _shapes(logits: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(z.shape) for name, z in logits.items()}


def _styles(classes: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Give each class a colour and a marker; the first 40 pairs differ."""
    ten = len(CLASS_COLOURS)
    return {
        label: (CLASS_COLOURS[index % ten], MARKERS[(index + index // ten) % len(MARKERS)])
        for index, label in enumerate(classes)
    }


def _panels(count: int) -> tuple[Figure, list[Any]]:
    """Build square panels in rows of at most three."""
    columns = 2 if count == 4 else min(count, 3)
    rows = math.ceil(count / columns)
    figure = new_figure(4 * columns, 4.2 * rows + 0.8)
    panels = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axes in panels[count:]:
        axes.remove()
    for axes in panels[:count]:
        axes.set(xticks=[], yticks=[], xlabel="", ylabel="")
    return figure, panels[:count]


def _scatter(
    axes: Any, places: Points, labels: Tensor, styles: Styles, *, filled: bool, edge: str | None = None
) -> None:
    size = min(22.0, max(6.0, 12000 / len(places)))
    for label, (colour, marker) in styles.items():
        x, y = places[(labels == label).numpy()].T
        face, line = colour if filled else "white", edge or colour
        axes.scatter(x, y, size, marker=marker, facecolors=face, edgecolors=line, linewidths=0.6, zorder=2 + filled)


def _finish(figure: Figure, title: str | None, styles: Styles, names: Sequence[str], epochs: Sequence[str]) -> Figure:
    """Set the title, and name the classes, and the two epochs if any, below all panels."""
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"linestyle": "", "markersize": 5}
    handles = [
        Line2D([], [], marker="o", color="0.4", markerfacecolor=face, label=epoch, **dot)
        for epoch, face in zip(epochs, ("white", "0.4"), strict=False)
    ]
    if len(styles) <= NAMED:
        handles += [Line2D([], [], marker=m, color=c, label=names[k], **dot) for k, (c, m) in styles.items()]
    labels = [str(handle.get_label()) for handle in handles]
    return finish(figure, title or "", handles, labels)
