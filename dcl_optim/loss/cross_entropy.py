r"""Read labels and loss scale off the gradient that a softmax cross-entropy sends to its logits.

Take one row: logits z, probabilities p = softmax(z), label y, label smoothing :math:`\epsilon`, K classes. A
cross-entropy that was multiplied by :math:`a` sends the gradient

.. math:: g = a\,(p - q), \qquad q = (1-\epsilon)\,e_y + \epsilon/K, \qquad \textstyle\sum_k g_k = 0.

Without smoothing the label is the only negative entry of g, so :math:`y = \arg\min g`. With smoothing it is the lowest
entry of :math:`g - \tfrac12 b\,p` for any b from :math:`2\epsilon a` to :math:`(4-2\epsilon)\,a`; the largest entry of
g/p will do, which is close to a and not above it, or :math:`4\epsilon` times the a of the last batch where g is little
more than rounding. Then :math:`r = p - q` is known, and since all rows have the same factor,
:math:`a = \lVert g\rVert / \lVert r\rVert`. The loss has this form where :math:`\lVert g - a r\rVert` is rounding. A
mean over n rows has :math:`a = s/n`, so :math:`s = a\,n`, n being the rows whose gradient is not zero.

If the model ends in ``log_softmax``, ``NLLLoss`` gives :math:`g = -a\,e_y`.

Rows with different factors (class and sample weights, focal and symmetric losses) or with several classes (mixup) have
another form. No gradient tells these losses apart, nor what they were multiplied by.

**Rounding.** Let u be the unit roundoff of the narrower dtype of z and g: :math:`2^{-8}` in bfloat16,
:math:`2^{-11}` in float16, :math:`2^{-24}` in float32.

- Every entry of g is rounded once, by at most u of itself, so :math:`\lVert g - a r\rVert \le u\,\lVert g\rVert`, in
  practice about u/2: the tolerance is u, or 0.001 where that is more.
- In float16 an entry below :math:`2^{-14}` is rounded by up to :math:`2^{-25}`. With smoothing that moves all entries
  of a row, and the label's by K times as much. A gradient scaler keeps the entries above.
- torch computes p from z in float32 if the loss runs under autocast or takes ``z.float()``. On logits in half precision
  it rounds :math:`\log p` to their dtype, and then :math:`p = \exp(\mathrm{round}(\log p))` is off by up to
  :math:`u\,\lvert\log p\rvert` of itself: 3 % where p is 0.001, which is most of r once the model fits. So a form
  includes the arithmetic of the softmax; with the right one p is exact.
- With smoothing in half precision each log-probability gets the gradient
  :math:`\mathrm{round}(\mathrm{round}(\epsilon/K)/n)`, and the label's three roundings more. That is another smoothing,
  by up to :math:`3u` of :math:`\epsilon`, and moves r by up to :math:`\rho = 3u\,\epsilon` in each row. If the a of the
  last batch explains g so far, :math:`\lvert\,\lVert g\rVert/a - \lVert r\rVert\,\rvert \le \rho\sqrt N`, it is
  taken again: once the model fits, rounding is most of r, and its length says nothing about a.

Log-probabilities have no softmax: with p = 0 the same formulas read them.

All functions are pure, take rows (N, K) of logits and gradient, and compute in float32 or wider. None but
:func:`choices` and :func:`tells_form` reads a value.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from dcl_optim.penalty.layout import wide
from dcl_optim.pytorch.internals import constant

LOG = -1.0  # in place of a label smoothing: the form of log-probabilities

TOLERANCE = 1e-3  # of |g - a r| / |g|, and more in bfloat16; the rounding of float32 leaves about 1e-6
ROUNDING = 1e-6  # of r in a row, in units of 1, where p is close to 1
STEP = 0.01  # from one smoothing that a person writes to the next
MAX_SMOOTHING = 0.5
NORMALIZED = 0.05  # of the logarithm of the sum of probabilities, which leaves room for bfloat16
CERTAIN = 0.99  # a form is chosen from rows whose two highest probabilities sum to less
CERTAIN_OF_TWO = 0.9  # of two classes: from rows whose highest probability is smaller
MIN_SPREAD = 0.01  # of two classes: how far the labels' probabilities must be apart to tell one factor from several
TINY = 1e-37

PART = 2**18  # numbers of which a CPU's norm in float32 is wrong by at most 0.03 %; of 8M by 0.8 %


class Form(NamedTuple):
    """The form of a gradient.

    Attributes:
        smoothing: the label smoothing, or ``LOG``.
        in_float32: whether the loss takes the softmax in float32 or wider; if not, in the logits' own dtype.
    """

    smoothing: float
    in_float32: bool = True


class Reading(NamedTuple):
    """What the gradient of one batch says, as tensors on its device.

    Attributes:
        labels: the label of each row (N,), K for none.
        scale: s, a scalar; the last one if rounding is all that is left of r, or if the gradient does not fit.
        fits: whether the gradient has the form; if not, no row has a label.
        num_live: how many rows have a gradient.
        rest: the length of what the form leaves unexplained.
    """

    labels: Tensor
    scale: Tensor
    fits: Tensor
    num_live: Tensor
    rest: Tensor


def read(form: Form, z: Tensor, g: Tensor, last_scale: Tensor | None = None, wants_labels: bool = True) -> Reading:
    """Read a gradient that has a known form.

    Args:
        form: its form.
        z, g: logits, rows (N, K), and the gradient of the loss with respect to them, in the dtypes of the script.
        last_scale: s of the batch before in the dtype of the reading; None (default) if it is not known, for 1.
        wants_labels: whether the labels are needed.

    Examples:
        >>> z = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.5, 1.0]], requires_grad=True)
        >>> loss = 8.0 * torch.nn.functional.cross_entropy(z, torch.tensor([0, 2]))
        >>> (g,) = torch.autograd.grad(loss, z)
        >>> reading = read(Form(0.0), z.detach(), g)
        >>> reading.labels, round(reading.scale.item(), 4), reading.fits
        (tensor([0, 2]), 8.0, tensor(True))
    """
    norm = torch.linalg.vector_norm if z.numel() <= PART else _norm_by_rows
    num_rows, num_classes = z.shape
    smoothing = max(form.smoothing, 0.0)
    # Not zero if an entry is not: a row sums to 0, or in half precision may be negative as a whole.
    size = g.amin(1) if form.smoothing == LOG else g.amax(1)
    live = size.bool()
    num_live = torch.linalg.vector_norm(size, 0, dtype=wide_dtype(z.dtype))  # counts in one kernel
    tolerance = tolerance_of(z.dtype, g.dtype)
    half_step = _half_step(g.dtype)
    rounding = ROUNDING if form.in_float32 else ROUNDING + 3.0 * _roundoff(z.dtype) * smoothing  # of r in a row
    g = wide(g)
    p = _probabilities(form, z)
    last = None
    if smoothing:
        last = None if last_scale is None else last_scale / num_live
        y = _smoothed_labels(p, g, live, smoothing, last)
    else:
        y = torch.add(g, p, alpha=-TINY).argmin(1)  # of entries that are all zero, as of a certain label, the likeliest
    r = p.scatter_(1, y.unsqueeze(1), smoothing - 1.0, reduce="add")  # p - q
    if smoothing:
        r.sub_(smoothing / num_classes)
    length = norm(r.mul_(live.unsqueeze(1)))
    whole = norm(g)
    a = whole / length
    if last is not None:  # which stays if rounding is all that tells the two apart
        a = torch.where((whole / last - length).abs() <= rounding * math.sqrt(num_rows), last, a)
    rest = norm(torch.addcmul(g, r, a, value=-1.0))  # nan if no row is live
    excess = torch.sub(rest, whole, alpha=tolerance)
    # All rows may be certain, so that only rounding is left of r. A larger a would explain any gradient by it, and the
    # last one any that is much smaller than before.
    scale = a * num_live
    least_scale = scale if last_scale is None else torch.minimum(scale, last_scale)
    limit = torch.addcdiv(excess, least_scale, num_live, value=-rounding * math.sqrt(num_rows))
    fits = limit <= half_step * (2.0 * num_classes if smoothing else math.sqrt(num_classes)) * math.sqrt(num_rows)
    if form.smoothing == LOG:
        fits = fits & ((torch.logsumexp(wide(z), 1).abs() <= NORMALIZED) | ~live).all()
    zero = constant(0.0, z.device)  # a comparison with a number makes a tensor of it first
    scale = torch.where(excess <= zero, scale, 1.0 if last_scale is None else last_scale)
    if wants_labels:
        y = torch.where(live & fits, y, constant(num_classes, z.device))
    return Reading(y, scale, fits, num_live, rest)


@functools.cache
def tolerance_of(z: torch.dtype, g: torch.dtype) -> float:
    """The share of a gradient that rounding may leave unexplained, for these dtypes of logits and gradient."""
    return max(TOLERANCE, _roundoff(z), _roundoff(g))


def _norm_by_rows(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(torch.linalg.vector_norm(rows, dim=1))


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2.0


@functools.cache
def _half_step(dtype: torch.dtype) -> float:
    """How far a number is rounded at least, however small it is."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2.0


@functools.cache
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or a wider dtype, in which values of a dtype are computed with."""
    return torch.promote_types(dtype, torch.float32)


def _probabilities(form: Form, z: Tensor) -> Tensor:
    """The softmax as the loss takes it, in float32 or wider; 0 of log-probabilities."""
    if form.smoothing == LOG:
        return torch.zeros_like(z, dtype=wide_dtype(z.dtype))
    if form.in_float32:
        return torch.softmax(z, 1, dtype=None if z.dtype.itemsize >= 4 else torch.float32)
    return wide(torch.log_softmax(z, 1)).exp_()


def _smoothed_labels(p: Tensor, g: Tensor, live: Tensor, smoothing: float, last: Tensor | None) -> Tensor:
    if p.shape[1] == 2:  # each row has the factor at one of the two, unless the model is too sure of the wrong class
        guess = torch.where(live, (g / (p - 0.5 * smoothing)).amax(1), torch.nan).nanmedian()
    else:
        guess = _steepest(p, g, smoothing / p.shape[1])
    if last is not None:
        guess = torch.maximum(guess, 4.0 * smoothing * last)
    return torch.addcmul(g, p, guess, value=-0.5).argmin(1)


def _steepest(p: Tensor, g: Tensor, least: float = 1e-3) -> Tensor:
    """A guess of a: no entry of g/p is above it, and entries far above their share of q come close to it."""
    return (g / p.clamp(min=least)).amax()


# ---- the first look, which chooses the form --------------------------------------------------------------------------


def tells_form(z: Tensor, g: Tensor) -> bool:
    """Whether a gradient tells forms apart: not all rows are certain. Synchronizes."""
    return bool(_telling(z, g).any())


def _telling(z: Tensor, g: Tensor) -> Tensor:
    """Rows in which a third class has a share; two classes have to differ among the rows."""
    num_classes = z.shape[1]
    top = torch.softmax(wide(z), 1).topk(min(2, max(num_classes - 1, 1)), 1).values.sum(1)
    rows = (g.abs().amax(1) > 0) & (top < (CERTAIN if num_classes > 2 else CERTAIN_OF_TWO))
    if num_classes == 2:
        spread = torch.where(rows, top, -1.0).amax() - torch.where(rows, top, 2.0).amin()
        rows = rows & (spread > max(MIN_SPREAD, 5.0 * tolerance_of(z.dtype, g.dtype)))
    return rows


def choices(z: Tensor, g: Tensor) -> list[Form]:
    """Forms that a cross-entropy may have whose gradient tells it: with the smoothing that fits. Synchronizes."""
    forms = []
    telling = _telling(z, g).unsqueeze(1)
    for in_float32 in arithmetics(z):
        p = _probabilities(Form(0.0, in_float32), z) * telling
        smoothing = float(_fitted_smoothing(p, wide(g) * telling, telling))
        near = [] if math.isnan(smoothing) else [round(smoothing / STEP) + shift for shift in (-1, 0, 1)]
        forms += [Form(0.0, in_float32)]
        forms += [Form(round(step * STEP, 2), in_float32) for step in near if 0 < step * STEP <= MAX_SMOOTHING]
    return forms


def arithmetics(z: Tensor) -> tuple[bool, ...]:
    """Whether the softmax of logits is in float32 or wider, for each arithmetic that a loss may have."""
    return (True,) if z.dtype.itemsize >= 4 else (True, False)


def best(readings: dict[Form, Reading]) -> Form | None:
    """The form that leaves the least of a gradient, or no smoothing if that leaves hardly more. Synchronizes."""
    rests = {form: float(reading.rest) for form, reading in readings.items() if bool(reading.fits)}
    return min(rests, key=lambda form: rests[form] if form.smoothing else 0.5 * rests[form], default=None)


def _fitted_smoothing(p: Tensor, g: Tensor, telling: Tensor) -> Tensor:
    """The smoothing, nan for none: at all entries but the label's g = a (p - smoothing / K), which is a line."""
    a = _steepest(p, g)
    for _ in range(2):  # the line through the others is a better guess of a
        y = torch.addcmul(g, p, a, value=-0.5).argmin(1, keepdim=True)
        others = telling.to(p).expand_as(p).scatter(1, y, 0.0)
        mean_p = (p * others).sum() / others.sum()
        mean_g = (g * others).sum() / others.sum()
        centered = (p - mean_p) * others
        a = (centered * g).sum() / centered.square().sum()
    return (mean_p - mean_g / a) * p.shape[1]
