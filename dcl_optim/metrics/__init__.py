r"""What the paper measures on logits: top non-target classes, their consistency and perplexity, and logit drift.
:func:`fit_temperature` calibrates the probabilities.

The *top non-target* of a sample is the wrong class that the model ranks highest. A model that has found which classes
resemble each other predicts the same one or two for all samples of a class.

Notation: N samples, K classes, c a sample's class, :math:`N_c` its number of samples, :math:`p(k|c)` the share of them
whose top non-target is k. *Absent* classes are those without a sample; their value is nan, which ``Tensor.nanmean``
leaves out of an average.

The functions take all samples at once. For samples in batches, add up :func:`top_non_target_counts` and divide each row
by its sum: this is :math:`p(k|c)`, from which the formulas give consistency and perplexity.
"""

from dcl_optim.metrics.drift import logit_drift
from dcl_optim.metrics.non_targets import (
    non_target_distribution,
    non_target_perplexity,
    top_non_target,
    top_non_target_consistency,
    top_non_target_counts,
)
from dcl_optim.metrics.temperature import fit_temperature

__all__ = [
    "fit_temperature",
    "logit_drift",
    "non_target_distribution",
    "non_target_perplexity",
    "top_non_target",
    "top_non_target_consistency",
    "top_non_target_counts",
]
