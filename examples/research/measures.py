"""Predictions beyond their accuracy: negative log-likelihood and calibration."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 15  # of the expected calibration error, as in Guo et al., ICML 2017


def quality(z: Tensor, y: Tensor, temperature: float = 1.0) -> dict[str, float]:
    """Measure predictions against labels.

    Args:
        z: logits, (N, K).
        y: class indices, (N,).
        temperature: that logits are divided by for the scaled ones.

    Returns:
        ``nll``, the mean negative log-likelihood; ``nll_scaled``, that of the logits divided by the temperature;
        ``ece`` and ``ece_scaled``, the expected calibration errors of the top class with 15 bins.

    Raises:
        ImportError: torchmetrics is not installed.
    """
    try:
        from torchmetrics.functional.classification import multiclass_calibration_error
    except ImportError as error:
        raise ImportError("the calibration error needs torchmetrics: pip install --group research") from error
    softmax = F.softmax(z, dim=1)
    scaled = F.softmax(z / temperature, dim=1)
    ece, ece_scaled = (
        multiclass_calibration_error(p, y, num_classes=z.shape[1], n_bins=BINS) for p in (softmax, scaled)
    )
    return {
        "nll": float(F.cross_entropy(z, y)),
        "nll_scaled": float(F.cross_entropy(z / temperature, y)),
        "ece": float(ece),
        "ece_scaled": float(ece_scaled),
    }


def fit_temperature(z: Tensor, y: Tensor) -> float:
    """Fit the temperature by which logits are to be divided before the softmax, as docs/choosing.md does.

    It is 1 where none is best: every prediction is right, or the logits say no more of the labels than chance does.

    Args:
        z: logits, (N, K).
        y: class indices, (N,).

    Source: C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
    """
    z = z.detach().cpu().double()
    y = y.cpu()
    own = z.gather(1, y[:, None])[:, 0]
    if bool((own >= z.amax(1)).all()) or float((z.mean(1) - own).mean()) >= 0:
        return 1.0
    log_temperature = torch.zeros((), dtype=z.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_temperature], max_iter=100, line_search_fn="strong_wolfe")

    def nll() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(z / log_temperature.exp(), y)
        loss.backward()
        return loss

    optimizer.step(nll)
    return float(log_temperature.detach().exp())
