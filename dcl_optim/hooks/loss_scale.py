r"""What the loss was multiplied by before backward: a gradient scaler's scale, 1/accumulation steps, a weight.

The penalty has to carry the same factor s, and backward does not tell it. Three ways, the first that applies wins:

1. ``loss_scale=`` given by the user: a number, a ``GradScaler``, a callable without arguments.
2. ``criterion=`` given by the user: the gradient that arrives at the criterion's output *is* s; where it sums
   (``reduction="sum"``), times the number of terms that its mean would divide by.
3. ``"auto"``: for a softmax cross-entropy the gradient of the logits is :math:`g_{ij} = a\,(p_{ij} - t_{ij})` with one
   slope a for all rows. Away from the targets g is a straight line in p, whose slope is fitted; :math:`s = a\,N`.
   Where g is no such line (another loss, per-sample or class weights, mixed labels), the gradient that arrives at the
   model's own loss (``output.loss``) is s; without one, s = 1.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from dcl_optim._torch import warn
from dcl_optim._validation import check_positive, is_number
from dcl_optim.forecaster import ForwardRecord, Scale

TINY = 1e-30
TOLERANCE = 1e-4  # share of the gradient's square left unexplained; bfloat16 rounding leaves about 1e-5
UNREADABLE = (
    "the loss scale (gradient scaler, accumulation, weights) cannot be read off this loss's gradient, so the penalty "
    "is added with factor 1; pass criterion=<the loss module>, or loss_scale=<number, GradScaler or callable> (1 if "
    "there is no factor), to the optimizer, and class_dim=-1 if the classes are the last dimension of (batch, time, "
    "classes)"
)
SEVERAL_HEADS = (
    "the criterion was called on several tensors for one forward, none of which is the output of the model as it "
    "returned it (logits that were resized or cast, of the main head and of others?), so nothing says which loss is "
    "the main head's, nor what it is multiplied by. Pass as criterion= a loss module that only the main head's calls, "
    "or call it on the model's output as it is, or leave criterion= out and pass loss_scale= (1 if there is no factor)"
)


def recover_from_cross_entropy(z: Tensor, gradient: Tensor) -> tuple[Scale, bool | Tensor]:
    r"""Read the factor s off the gradient that a softmax cross-entropy sent to the logits.

    Exact up to rounding for hard labels, reduction mean (then s is the factor) or sum (then N times the factor),
    ignore_index, and label smoothing of four classes or more. A smoothing of :math:`\epsilon` cannot be told from a
    factor :math:`1-\epsilon` while all predictions are still uniform.

    Args:
        z: logits, rows (N, K).
        gradient: the loss's gradient with respect to z, same shape.

    Returns:
        s, and whether the gradient is of that form; s is 1 where it is not, or has no rows. Numbers on the CPU; scalar
        tensors elsewhere, so that nothing synchronises.

    Examples:
        >>> z = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.5, 1.0]], requires_grad=True)
        >>> loss = 8.0 * torch.nn.functional.cross_entropy(z, torch.tensor([0, 2]))
        >>> scale, found = recover_from_cross_entropy(z.detach(), torch.autograd.grad(loss, z)[0])
        >>> round(scale, 4), found
        (8.0, True)
    """
    if not len(z):
        return 1.0, False
    g = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    p = torch.softmax(z.to(g.dtype), dim=1)
    # Hard labels: the target is the one entry below zero, and the line goes through the origin.
    if gradient.device.type == "cpu":  # a device would synchronise
        negative = g < 0
        slope, fits = _fit(p.masked_fill(negative, 0.0), g.clamp(min=0.0))
        if fits and int(torch.count_nonzero(negative)) == len(z) and len(z) * (z.shape[1] - 1) > 1:
            return slope * len(z), True
    return _recover_from_rows(p, g, gradient.dtype)


def _fit(p: Tensor, g: Tensor) -> tuple[Any, Any]:
    """The slope of a straight line through the origin, and whether the gradients lie on it."""
    moments = torch.stack((p.flatten(), g.flatten()))
    (pp, pg), (_, gg) = _numbers(moments @ moments.T)
    slope = pg / (pp + TINY)
    return slope, (slope > 0) & (gg - slope * pg <= TOLERANCE * gg)


def _recover_from_rows(p: Tensor, g: Tensor, dtype: torch.dtype) -> tuple[Scale, bool | Tensor]:
    """As :func:`recover_from_cross_entropy`, also with rows that are ignored, sure or smoothed."""
    least, target = g.min(1, keepdim=True)
    negative, live = least < 0, (g != 0).any(1, keepdim=True)
    # Ignored rows have a gradient of zero throughout. A sure row, whose p is rounded to 1 at the target, has none below
    # zero; in float16 its gradient vanishes altogether, and must not pass for an ignored row's.
    if dtype == torch.float16:
        live |= p.amax(1, keepdim=True) > 1 - 1e-6
    p = p * live
    target = torch.where(negative, target, p.argmax(1, keepdim=True))
    slope, fits = _fit(p.scatter(1, target, 0.0), g.scatter(1, target, 0.0))
    (rows,) = _numbers(live.sum().to(g.dtype)[None])
    usable = rows * (p.shape[1] - 1) > 1
    found = usable & fits
    if found is not True and p.shape[1] > 3:
        shifted, fits = _fit_smoothed(p, g, target, rows)
        slope, found = _choose(found, slope, shifted), found | (fits & usable)
    return _choose(found, slope * rows, 1.0), found


def _fit_smoothed(p: Tensor, g: Tensor, least: Tensor, rows: Any) -> tuple[Any, Any]:
    """The slope under label smoothing, which shifts the line, and whether it fits.

    An overconfident target's gradient is no longer the least, but the target then has the largest p.
    """
    largest = p.argmax(1, keepdim=True)
    p, g = (t.scatter(1, torch.cat([least, largest], 1), 0.0).flatten() for t in (p, g))
    sums = [p @ p, p @ g, g @ g, p.sum(), g.sum(), (least != largest).sum().to(p.dtype)]
    raw, pg, gg, p_sum, g_sum, second = _numbers(torch.stack(sums))
    count = rows * (len(p) // len(largest) - 1) - second + TINY
    pp, pg, gg = raw - p_sum * p_sum / count, pg - p_sum * g_sum / count, gg - g_sum * g_sum / count
    slope = pg / (pp + TINY)
    # Nearly uniform predictions say nothing: there other losses are straight lines in p too, of other slopes.
    return slope, (slope > 0) & (pp > 1e-3 * raw) & (gg - slope * pg <= TOLERANCE * gg)


def _numbers(scalars: Tensor) -> list[Any]:
    """Plain numbers on the CPU, where they are much cheaper to go on with; tensors elsewhere."""
    return scalars.tolist() if scalars.device.type == "cpu" else list(scalars.unbind())


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


class LossScale:
    """Resolves s for one backward after another.

    Args:
        source: ``"auto"``, a positive number, an object with a ``scale(tensor)`` method (``torch.amp.GradScaler``), or
            a callable without arguments that returns a finite number or a scalar tensor.

    Raises:
        ValueError: an unknown name, or a number that is not positive and finite.
        TypeError: anything else.

    Examples:
        >>> LossScale(1024.0).source
        1024.0
        >>> LossScale("half")
        Traceback (most recent call last):
        ...
        ValueError: loss_scale='half' is unknown; pass 'auto', a number, a GradScaler or a callable
    """

    def __init__(self, source: Any) -> None:
        known = source == "auto" if isinstance(source, str) else callable(source) or hasattr(source, "scale")
        if isinstance(source, str) and not known:
            raise ValueError(f"loss_scale={source!r} is unknown; pass 'auto', a number, a GradScaler or a callable")
        if is_number(source):
            check_positive("loss_scale", source)
        elif not known:
            raise TypeError(f"loss_scale must be 'auto', a number, a GradScaler or a callable, got {source!r}")
        self.source = source
        self._settled = False  # whether a warning is out, or looking again would synchronise a device again

    def resolve(self, record: ForwardRecord, gradient: Tensor, backward: int, several: bool) -> Scale:
        """Find s for a backward, by its number, that brought a gradient to a forward's logits.

        A gradient that cannot be read is worth a warning where a wrong s would matter: with float16 logits, and where
        this is not the first backward since the last step (``several``).

        Raises:
            RuntimeError: the criterion's losses are of several heads, and which is the main one's is unknown.
        """
        if self.source != "auto":
            return self._given(gradient)
        if record.criterion_scale[0] == backward:
            if record.has_several_heads:
                raise RuntimeError(SEVERAL_HEADS)
            return record.criterion_scale[1]
        scale, found = recover_from_cross_entropy(record.logits, record.rows(gradient))
        if record.model_scale[0] == backward:
            return _choose(found, scale, record.model_scale[1])
        if (several or gradient.dtype == torch.float16) and not self._settled and len(record.logits):
            if bool(found):
                self._settled = gradient.device.type != "cpu"
            elif bool(gradient.isfinite().all()):  # else a step that will be skipped, which says nothing of the loss
                self._settled = True
                warn(UNREADABLE)
        return scale

    def _given(self, gradient: Tensor) -> Scale:
        if isinstance(self.source, numbers.Real):
            return float(self.source)
        if hasattr(self.source, "scale"):
            scale: Tensor = self.source.scale(torch.ones((), device=gradient.device))
            return scale
        given = self.source()
        if isinstance(given, Tensor) and given.numel() == 1:
            if given.device.type != "cpu":  # taken as it is: a look would synchronise
                return given.reshape(())
            given = given.item()
        if not is_number(given):
            raise TypeError(f"loss_scale's callable must return a number or a scalar tensor, got {given!r}")
        if not math.isfinite(given):
            raise ValueError(f"loss_scale's callable returned {given!r}; it must be a finite number")
        return float(given)
