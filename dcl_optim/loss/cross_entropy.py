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

All functions are pure, take rows (N, K) of logits and gradient, and compute in float32 or wider, in blocks of rows
where there are many numbers. None but :func:`examine` reads a value.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from dcl_optim import layout
from dcl_optim._torch import constant
from dcl_optim.layout import blocks, sum_to_one, wide

LOG = -1.0  # in place of a label smoothing: the form of log-probabilities

TOLERANCE = 1e-3  # of |g - a r| / |g|, and more in bfloat16; the rounding of float32 leaves about 1e-6
ROUNDING = 1e-6  # of r in a row, in units of 1, where p is close to 1
MIN_SMOOTHING = 2e-3  # a smaller one is rounding
MIN_HALF_SMOOTHING = 5e-3
MAX_SMOOTHING = 0.5
STEP = 0.01  # from one smoothing that a person writes to the next
LEAST_ERROR = 1e-4  # of a smoothing that was fitted
DISTINCT = 256  # of the rounded log-probabilities of a batch; those that are equal have the same rounding of g
MAX_ERROR = 5e-3  # more would let other losses pass
CERTAIN = 0.99  # a form is chosen from rows whose two highest probabilities sum to less
CERTAIN_OF_TWO = 0.9  # of two classes: from rows whose highest probability is smaller
MIN_SPREAD = 0.01  # of two classes: how far the labels' probabilities must be apart to tell one factor from several
TINY = 1e-37
PART = 2**18  # numbers of which a norm in float32 is wrong by at most 0.03 %


class Form(NamedTuple):
    """The form of a gradient.

    Attributes:
        smoothing: the label smoothing, or ``LOG``.
        in_float32: whether the loss takes the softmax in float32 or wider; if not, in the logits' own dtype.
        error: how far the smoothing of a gradient may be from that.
    """

    smoothing: float
    in_float32: bool = True
    error: float = 0.0


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
    if form.smoothing == LOG:
        return _read_log_probabilities(z, g, last_scale)
    size = g.amax(1)  # not zero if an entry is not: a row sums to 0, or in half precision may be negative as a whole
    live = size.bool()
    num_live = torch.linalg.vector_norm(size, 0, dtype=wide_dtype(z.dtype))  # counts in one kernel
    rounding = ROUNDING + form.error  # of r in a row
    last = None
    if form.smoothing and last_scale is not None:
        last = _Last(last_scale / num_live, rounding)
    if z.numel() <= layout.BLOCK:
        read_rows = _read_block(form, z, g, live, last)
    else:
        parts = blocks(z)
        read_rows = _together([_read_block(form, z[part], g[part], live[part], last) for part in parts], last)
    labels, _, whole, slope, rest = read_rows
    excess = torch.sub(rest, whole, alpha=tolerance_of(z.dtype, g.dtype))
    # All rows may be certain, so that only rounding is left of r. A larger a would explain any gradient by it, and the
    # last one any that is much smaller than before.
    scale = slope * num_live
    least_scale = scale if last_scale is None else torch.minimum(scale, last_scale)
    num_rows, num_classes = z.shape
    least = _half_step(g.dtype) * (2.0 * num_classes if form.smoothing else math.sqrt(num_classes))
    limit = torch.addcdiv(excess, least_scale, num_live, value=-rounding * math.sqrt(num_rows))
    fits = limit <= least * math.sqrt(num_rows)
    zero = constant(0.0, z.device)  # a comparison with a number makes a tensor of it first
    scale = torch.where(excess <= zero, scale, 1.0 if last_scale is None else last_scale)
    if wants_labels:
        labels = torch.where(live & fits, labels, constant(num_classes, z.device))
    return Reading(labels, scale, fits, num_live, rest)


@functools.cache
def tolerance_of(z: torch.dtype, g: torch.dtype) -> float:
    """The share of a gradient that rounding may leave unexplained, for these dtypes of logits and gradient."""
    return max(TOLERANCE, _roundoff(z), _roundoff(g))


def arithmetics(z: Tensor) -> tuple[bool, ...]:
    """Whether the softmax of logits is in float32 or wider, for each arithmetic that a loss may have."""
    return (True,) if z.dtype.itemsize >= 4 else (True, False)


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


class _Last(NamedTuple):
    """The factor of the batch before.

    Attributes:
        slope: a, a scalar.
        rounding: of r in a row.
    """

    slope: Tensor
    rounding: float


class _Block(NamedTuple):
    """Rows of hard labels: their labels, and what their gradient adds up to."""

    labels: Tensor
    length: Tensor  # of r
    whole: Tensor  # of g
    slope: Tensor  # a
    rest: Tensor  # of g - a r, with the a of this block


def _read_block(form: Form, z: Tensor, g: Tensor, live: Tensor, last: _Last | None) -> _Block:
    norm = torch.linalg.vector_norm if z.numel() <= PART else _norm_in_parts
    p = _probabilities(z, form.in_float32)
    g = wide(g)
    if form.smoothing:
        y = _smoothed_labels(p, g, live, form.smoothing, last)
    else:
        lowest = torch.add(g, p, alpha=-TINY)  # of entries that are all zero, as of a certain label, the likeliest
        y = lowest.argmin(1)
    r = p.scatter_(1, y.unsqueeze(1), form.smoothing - 1.0, reduce="add")  # p - q
    if form.smoothing:
        r.sub_(form.smoothing / z.shape[1])
    length = norm(r.mul_(live.unsqueeze(1)))
    whole = norm(g)
    a = whole / length if last is None else _slope(whole, length, len(z), last)
    rest = norm(torch.addcmul(g, r, a, value=-1.0))  # nan if no row is live
    return _Block(y, length, whole, a, rest)


def _norm_in_parts(rows: Tensor) -> Tensor:
    """The norm of all numbers, in parts: a CPU's of 8M numbers in float32 is wrong by up to 0.8 %."""
    return torch.nn.utils.get_total_norm(rows.split(max(PART // rows.shape[1], 1)))


def _slope(whole: Tensor, length: Tensor, num_rows: int, last: _Last) -> Tensor:
    """The factor a; the last one if rounding is all that tells the two apart."""
    slope = whole / length
    apart = (whole / last.slope - length).abs()
    return torch.where(apart <= last.rounding * math.sqrt(num_rows), last.slope, slope)


def _together(found: list[_Block], last: _Last | None) -> _Block:
    """All rows, whose blocks must have the same factor a too."""
    rows, *sums = zip(*found, strict=True)
    lengths, wholes, _, rests = (torch.stack(one) for one in sums)
    length = torch.linalg.vector_norm(lengths)
    whole = torch.linalg.vector_norm(wholes)
    labels = torch.cat(rows)
    slope = whole / length if last is None else _slope(whole, length, len(labels), last)
    apart = (wholes - slope * lengths).abs()
    rests = torch.where((lengths == 0) & (wholes == 0), 0.0, rests)  # a block without a live row
    rest = torch.linalg.vector_norm(rests + apart)
    return _Block(labels, length, whole, slope, rest)


def _probabilities(z: Tensor, in_float32: bool) -> Tensor:
    """The softmax as the loss takes it, in float32 or wider."""
    if in_float32:
        return torch.softmax(z, 1, dtype=None if z.dtype.itemsize >= 4 else torch.float32)
    return wide(torch.log_softmax(z, 1)).exp_()


def _smoothed_labels(p: Tensor, g: Tensor, live: Tensor, smoothing: float, last: _Last | None) -> Tensor:
    if p.shape[1] == 2:  # each row has the factor at one of the two, unless the model is too sure of the wrong class
        guess = torch.where(live, (g / (p - 0.5 * smoothing)).amax(1), torch.nan).nanmedian()
    else:
        guess = _steepest(p, g, smoothing / p.shape[1])
    if last is not None:
        guess = torch.maximum(guess, 4.0 * smoothing * last.slope)
    return torch.addcmul(g, p, guess, value=-0.5).argmin(1)


def _steepest(p: Tensor, g: Tensor, least: float = 1e-3) -> Tensor:
    """A guess of a: no entry of g/p is above it, and entries far above their share of q come close to it."""
    return (g / p.clamp(min=least)).amax()


def _read_log_probabilities(z: Tensor, g: Tensor, last_scale: Tensor | None) -> Reading:
    tolerance = tolerance_of(z.dtype, g.dtype)
    g = wide(g)
    live = g.abs().amax(1) > 0
    num_live = live.sum(dtype=g.dtype)
    least, y = g.min(1)
    whole = torch.linalg.vector_norm(least)
    rest = torch.linalg.vector_norm(g.scatter(1, y[:, None], 0.0))
    apart = torch.linalg.vector_norm((least - least.sum() / num_live) * live)  # one factor for all rows
    normalized = ((torch.logsumexp(wide(z), 1).abs() <= 0.05) | ~live).all()  # which leaves room for bfloat16
    rest = torch.maximum(rest, apart)
    fits = (rest <= tolerance * whole) & (whole > 0) & normalized
    scale = torch.where(fits, -least.sum(), 1.0 if last_scale is None else last_scale)
    return Reading(torch.where(live & fits, y, z.shape[1]), scale, fits, num_live, rest)


# ---- the first look, which chooses the form --------------------------------------------------------------------------


class Evidence(NamedTuple):
    """What a gradient says about its form, as numbers.

    Attributes:
        says: whether it tells forms apart: not all rows are certain.
        form: the form, if it is that of a cross-entropy of logits.
        is_softmax: whether the logits are probabilities.
    """

    says: bool
    form: Form
    is_softmax: bool


def examine(z: Tensor, g: Tensor, in_float32: bool = True) -> Evidence:
    """Look for the form of rows of one gradient, in one arithmetic. Synchronizes once."""
    num_classes = z.shape[1]
    tolerance = tolerance_of(z.dtype, g.dtype)
    is_half = min(z.dtype.itemsize, g.dtype.itemsize) < 4
    roundoff = _roundoff(g.dtype)
    p = _probabilities(z, in_float32)
    g = g.to(p.dtype)
    # Only rows in which a third class has a share tell the forms apart; two classes have to differ among the rows.
    top = p.topk(min(2, max(num_classes - 1, 1)), 1).values.sum(1)
    told = (g.abs().amax(1) > 0) & (top < (CERTAIN if num_classes > 2 else CERTAIN_OF_TWO))
    says = told.any()
    if num_classes == 2:
        spread = torch.where(told, top, -1.0).amax() - torch.where(told, top, 2.0).amin()
        says = says & (spread > max(MIN_SPREAD, 5.0 * tolerance))
    is_softmax = (z.amin() > 0) & sum_to_one(z, is_half)
    most = math.inf if in_float32 else DISTINCT
    fitted = _fit_smoothing(p * told[:, None], g * told[:, None], told, max(_roundoff(z.dtype), roundoff), most)
    found = torch.stack([value.to(p.dtype) for value in (says, is_softmax, *fitted)])
    says_form, of_softmax, is_needed, smoothing, error = found.tolist()
    form = Form(0.0, in_float32)
    least = MIN_HALF_SMOOTHING if is_half else MIN_SMOOTHING
    if is_needed and least < smoothing < MAX_SMOOTHING:
        form = _smoothed_form(smoothing, error, in_float32, z.dtype)
    return Evidence(says_form > 0, form, of_softmax > 0)


def _smoothed_form(smoothing: float, error: float, in_float32: bool, dtype: torch.dtype) -> Form:
    """The form of a smoothing that was fitted, up to an error: a person has written a multiple of 0.01."""
    of_arithmetic = 0.0 if in_float32 else 3.0 * _roundoff(dtype) * smoothing
    written = round(round(smoothing / STEP) * STEP, 2)
    if error <= STEP and abs(smoothing - written) <= error + of_arithmetic:
        return Form(written, in_float32, of_arithmetic)
    return Form(smoothing, in_float32, min(error, MAX_ERROR) + of_arithmetic)


def _fit_smoothing(p: Tensor, g: Tensor, told: Tensor, roundoff: float, most: float) -> tuple[Tensor, Tensor, Tensor]:
    """Whether a label smoothing is needed, the smoothing, and how far it may be off: four standard errors.

    At all entries but the label's, g = a (p - f) is a line, with the floor f = smoothing / K. It is not needed if a
    line without a floor fits as well. Rounding is independent in ``most`` entries at most.
    """
    guess = _steepest(p, g)
    rows = told[:, None].to(p).expand_as(p)
    for _ in range(2):  # the line through the others is a better guess of a
        y = torch.addcmul(g, p, guess, value=-0.5).argmin(1, keepdim=True)
        others = rows.scatter(1, y, 0.0)
        total = others.sum() + TINY
        mean_p = (p * others).sum() / total
        mean_g = (g * others).sum() / total
        centered = (p - mean_p) * others
        spread = centered.square().sum() + TINY
        guess = (centered * g).sum() / spread
    floor = mean_p - mean_g / (guess + TINY)
    rest = torch.linalg.vector_norm((g - guess * (p - floor)) * others)
    through_zero = (p * g * others).sum() / ((p * others).square().sum() + TINY)
    without = torch.linalg.vector_norm((g - through_zero * p) * others)
    is_needed = without > 2.0 * rest + 1e-5 * torch.linalg.vector_norm(g)
    noise = torch.maximum(rest, roundoff * torch.linalg.vector_norm(g * others))  # few points lie on a line
    number = total.clamp(max=most)
    standard_error = noise / (guess.abs() + TINY) * torch.sqrt((1.0 / total + mean_p.square() / spread) / number)
    return is_needed, floor * p.shape[1], LEAST_ERROR + 4.0 * standard_error * p.shape[1]
