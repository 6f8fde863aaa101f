"""Calibration: the one temperature that makes a model's probabilities fit."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fit_temperature"]

TOLERANCE = 1e-10  # of 1 / T


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    r"""Fit the temperature T by which logits are to be divided before the softmax.

    .. math:: T = \operatorname{argmin}_{T > 0}\; -\frac1N \sum_i \log \sigma(z_i / T)_{y_i}

    The minimum is unique, since the negative log-likelihood is convex in 1/T. Newton's method finds it in float64. Fit
    T on validation data, and divide the logits of new data by it. The predicted classes stay the same.

    Args:
        logits: (N, K), with K at least 2; minus infinity for masked classes.
        labels: class indices, (N,).

    Raises:
        ValueError: another shape, a label out of range, logits that are not numbers; or there is no minimum: every
            prediction is right, so that T would be 0, or the logits say no more of the labels than chance does, so that
            it would be infinite.

    Examples:
        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 0.0]])
        >>> T = fit_temperature(logits, torch.tensor([0, 0, 1, 1]))  # three of four are right
        >>> (logits / T).softmax(1).amax(1)
        tensor([0.7500, 0.7500, 0.7500, 0.7500])

    Source: C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
    """
    _check(logits, labels)
    z = logits.detach().cpu().double()  # not every device has float64
    z = z - z.amax(1, keepdim=True)
    own = z.gather(1, labels[:, None].long().to(z.device))[:, 0]
    if not own.isfinite().all():
        raise ValueError("logits must be finite, and minus infinity at no label")
    finite = z.masked_fill(z == -torch.inf, 0.0)

    def derivatives(b: float) -> tuple[float, float]:
        """Of the negative log-likelihood by b = 1/T."""
        p = torch.softmax(b * z, 1)
        mean = (p * finite).sum(1)
        return float((mean - own).mean()), float(((p * finite.square()).sum(1) - mean.square()).mean())

    if float((finite.sum(1) / (z > -torch.inf).sum(1) - own).mean()) >= 0:
        raise ValueError("the logits say no more of the labels than chance does, so that no temperature is best")
    if not own.any():
        raise ValueError("every prediction is right, so that no temperature is best; take more or harder data")
    low = 0.0
    high = 1.0 / max(float(-z[z > -torch.inf].min()), 1e-300)
    while derivatives(high)[0] < 0:
        low = high
        high = 2.0 * high
    b = 0.5 * (low + high)
    while high - low > TOLERANCE * high:
        slope, curvature = derivatives(b)
        if slope < 0:
            low = b
        else:
            high = b
        step = b - slope / curvature if curvature > 0 else low
        if abs(step - b) <= TOLERANCE * b:
            break
        b = step if low < step < high else 0.5 * (low + high)
    return 1.0 / b


def _check(logits: Tensor, labels: Tensor) -> None:
    """Raise ValueError unless logits and labels have the right shapes and the labels are classes."""
    if logits.ndim != 2 or logits.shape[1] < 2 or labels.shape != logits.shape[:1] or not len(labels):
        shapes = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"logits and labels have shapes {shapes}; they must be (N, K) and (N,), N >= 1 and K >= 2")
    if (
        labels.is_floating_point()
        or labels.dtype == torch.bool
        or not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[1]
    ):
        raise ValueError(f"labels must be class indices from 0 to {logits.shape[1] - 1}; leave ignored rows out")
