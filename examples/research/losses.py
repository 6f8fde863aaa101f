"""DCP with a loss whose gradient is smaller than that of cross-entropy: which weight is right?

The gradient of generalized cross-entropy (GCE) in the logits is that of cross-entropy times :math:`p_y^q`. At the start
:math:`p_y = 1/K`, so with 150 classes and q = 0.3 it is 0.22 of that of cross-entropy, and less for a label that the
model finds unlikely. The penalty is not smaller, so that λ = 1 weighs as 4.5 does with cross-entropy.

Fixed before the runs, on validation images: if that is why λ = 1 collapses with GCE, then 4.5 collapses with
cross-entropy as well, and with GCE 0.22 gains as 1 does with cross-entropy. Kanji, 5 of each, a fifth of the labels
wrong, α = 0.6, three seeds. Beside them a weight of a third of that, and DCP's default weight, which starts at 0.1.
"""

from __future__ import annotations

from dataclasses import replace

from examples.research.configuration import DCP, Configuration, Experiment
from examples.research.rivals.settings import FAST

Q = 0.3
PLAIN = FAST["kanji-5-noise-20"].plain
WEIGHTS = {"CE": (1.0, 4.5), "GCE": (0.07, 0.22, 1.0)}


def _experiment() -> Experiment:
    runs: dict[str, Configuration] = {}
    for name, options in {"CE": {}, "GCE": {"generalized": Q}}.items():
        runs[name] = replace(PLAIN, options=options)
        for weight in WEIGHTS[name]:
            fixed = DCP | {"weight": weight, "alpha": 0.6}
            runs[f"{name}, λ = {weight:g}"] = replace(PLAIN, method="dcp", options=fixed | options)
    runs["GCE, default weight"] = replace(PLAIN, method="dcp", options=DCP | {"alpha": 0.6, "generalized": Q})
    return Experiment(
        "DCP with cross-entropy and with GCE 0.3, a fifth of the labels wrong", "validation", 3, "CE", runs
    )


EXPERIMENTS: dict[str, Experiment] = {"losses-kanji": _experiment()}
