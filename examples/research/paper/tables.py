"""All tables by name."""

from __future__ import annotations

from collections.abc import Callable

from examples.research.paper import ablations, applied, supervised
from examples.research.paper.recipes import Recipe
from examples.research.paper.rows import Table

_TABLES: dict[str, Callable[[Recipe], Table]] = {
    "main": supervised.main,
    "baselines": supervised.baselines,
    "fine-tuning": applied.fine_tuning,
    "semi-supervised": applied.semi_supervised,
    "self-supervised": applied.self_supervised,
    "distillation": applied.distillation,
    "distances": ablations.distances,
    "augmentations": supervised.augmentations,
    "companion-sizes": ablations.companion_sizes,
    "companion-data": ablations.companion_data,
    "alpha": ablations.alpha,
    "ensembles": ablations.ensembles,
    "readings": ablations.readings,
    "figures": supervised.figures,
}
NAMES = tuple(_TABLES)
# What of the paper has no row, and why.
WITHOUT = (
    "Section 4.2's 1298M and 4198M multiplications: a property of the networks, which a test checks.",
    "Figure 1, left, and the theory: nothing is measured. Figure 4 beyond 40 labels: points without numbers.",
    "Table 2's SAF on ImageNet with batches of 4,096: of its authors; the row here has batches of 256.",
)


def build(recipe: Recipe) -> dict[str, Table]:
    """The tables with the settings of a recipe."""
    return {name: make(recipe) for name, make in _TABLES.items()}
