r"""Read labels and loss scale off the gradient that a softmax cross-entropy sends to its logits.

Take one row: logits z, probabilities p = softmax(z), label y, label smoothing :math:`\epsilon`, K classes. A
cross-entropy that was multiplied by :math:`a` sends the gradient

.. math:: g = a\,(p - q), \qquad q = (1-\epsilon)\,e_y + \epsilon/K, \qquad \textstyle\sum_k g_k = 0.

Without smoothing the label is the only negative entry of g, so :math:`y = \arg\min g`. With smoothing it is the lowest
entry of :math:`g - \tfrac12 b\,p` for any b from :math:`2\epsilon a` to :math:`(4-2\epsilon)\,a`; the largest entry of
g/p will do, which is close to a and not above it. Then :math:`r = p - q` is known, and since all rows have the same
factor, :math:`a = \lVert g\rVert / \lVert r\rVert`. The loss has this form where :math:`\lVert g - a r\rVert` is
rounding. A mean over n rows has :math:`a = s/n`, so :math:`s = a\,n`, n being the rows whose gradient is not zero.

If the model ends in ``log_softmax``, ``NLLLoss`` gives :math:`g = -a\,e_y`.

Rows with different factors (class and sample weights, focal and symmetric losses) or with several classes (mixup) have
another form. No gradient tells these losses apart, nor what they were multiplied by.

All functions are pure, take rows (N, K) of logits and gradient, and compute in float32 or wider, in blocks of rows
where there are many numbers. None but :func:`examine` reads a value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dcl_optim._torch import constant
from dcl_optim.layout import blocks, sum_to_one, wide

LOG = -1.0  # the form of log-probabilities; every other form is its label smoothing

TOLERANCE = 1e-3  # of |g - a r| / |g| in float32; the rounding of float32 leaves about 1e-6
HALF_TOLERANCE = 2e-2  # where z or g is in half precision; the rounding of bfloat16 leaves about 4e-3
ROUNDING = 1e-6  # of r in a row, in units of 1, where p is close to 1
HALF_LENGTH = 0.1  # of r in half precision: less is rounding of p in few certain rows
HALF_LENGTH_OF_ONE = 0.5  # of one row, of which a smoothing that is rounded moves the scale by more than of several
MIN_SMOOTHING = 2e-3  # a smaller one is rounding
MIN_HALF_SMOOTHING = 1e-2
MAX_SMOOTHING = 0.5
CERTAIN = 0.99  # a form is chosen from rows whose two highest probabilities sum to less
CERTAIN_OF_TWO = 0.9  # of two classes: from rows whose highest probability is smaller
MIN_SPREAD = 0.01  # of two classes: how far the labels' probabilities must be apart to tell one factor from several
TINY = 1e-37
PART = 2**18  # numbers of which a norm in float32 is wrong by at most 0.03 %


class Reading(NamedTuple):
    """What the gradient of one batch says, as tensors on its device.

    Attributes:
        labels: the label of each row (N,), K for none.
        scale: s, a scalar.
        fits: whether the gradient has the form; if not, the labels and s mean nothing.
        tells_scale: whether s can be trusted too; not if all rows are so certain that rounding is all that is left.
        num_live: how many rows have a gradient.
    """

    labels: Tensor
    scale: Tensor
    fits: Tensor
    tells_scale: Tensor
    num_live: Tensor


def read(form: float, z: Tensor, g: Tensor, wants_labels: bool = True) -> Reading:
    """Read a gradient that has a known form.

    Args:
        form: the label smoothing, or ``LOG``.
        z, g: logits, rows (N, K), and the gradient of the loss with respect to them, in the dtypes of the script.
        wants_labels: whether the labels are needed.

    Examples:
        >>> z = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.5, 1.0]], requires_grad=True)
        >>> loss = 8.0 * torch.nn.functional.cross_entropy(z, torch.tensor([0, 2]))
        >>> (g,) = torch.autograd.grad(loss, z)
        >>> reading = read(0.0, z.detach(), g)
        >>> reading.labels, round(reading.scale.item(), 4), reading.fits
        (tensor([0, 2]), 8.0, tensor(True))
    """
    if form == LOG:
        return _read_log_probabilities(z, g)
    parts = blocks(z)
    if len(parts) == 1:
        read_rows = _read_block(z, g, form)
    else:
        read_rows = _together([_read_block(z[part], g[part], form) for part in parts])
    labels, live, num_live, length, _, slope, rest = read_rows
    half = is_half(z, g)
    excess = torch.sub(rest, length, alpha=HALF_TOLERANCE if half else TOLERANCE)
    fits = excess <= ROUNDING * math.sqrt(len(z))  # all rows may be certain, so that only rounding is left
    tells_scale = excess <= 0
    if half:
        tells_scale = tells_scale & (length > max(HALF_LENGTH, HALF_LENGTH_OF_ONE / max(len(z), 1)))
    if wants_labels:
        labels = torch.where(live & fits, labels, constant(z.shape[1], labels.device))
    return Reading(labels, slope * num_live, fits, tells_scale, num_live)


def is_half(z: Tensor, g: Tensor) -> bool:
    """Whether logits or gradient are in half precision."""
    return min(z.dtype.itemsize, g.dtype.itemsize) < 4


def tolerance_of(z: Tensor, g: Tensor) -> float:
    """The share of a gradient that rounding may leave unexplained."""
    return HALF_TOLERANCE if is_half(z, g) else TOLERANCE


class _Block(NamedTuple):
    """Rows of hard labels: their labels, which of them are live, and what their gradient adds up to."""

    labels: Tensor
    live: Tensor
    num_live: Tensor
    length: Tensor  # of r
    whole: Tensor  # of g
    slope: Tensor  # a
    rest: Tensor  # of r - g/a, with the a of this block


def _read_block(z: Tensor, g: Tensor, smoothing: float) -> _Block:
    size = g.amax(1)  # a row sums to 0, so it has a positive entry unless all are 0
    live = size > 0
    p = _probabilities(z)
    g = g.to(p.dtype)
    num_live = torch.linalg.vector_norm(size, 0, dtype=p.dtype)  # counts in one kernel
    y = _hard_labels(p, g, live, smoothing)
    r = p.scatter_(1, y[:, None], smoothing - 1.0, reduce="add")  # p - q
    if smoothing:
        r.sub_(smoothing / z.shape[1])
    length = _norm(r.mul_(live[:, None]))
    whole = _norm(g)
    a = whole / length
    rest = _norm(torch.addcmul(g, r, a, value=-1.0)) / a  # nan if no row is live
    return _Block(y, live, num_live, length, whole, a, rest)


def _norm(rows: Tensor) -> Tensor:
    """The norm of all numbers, in parts: a CPU's of 8M numbers in float32 is wrong by up to 0.8 %."""
    if rows.numel() <= PART:
        return torch.linalg.vector_norm(rows)
    return torch.nn.utils.get_total_norm(rows.split(max(PART // rows.shape[1], 1)))


def _together(found: list[_Block]) -> _Block:
    """All rows, whose blocks must have the same factor a too."""
    labels, live, *sums = zip(*found, strict=True)
    num_live, lengths, wholes, _, rests = (torch.stack(one) for one in sums)
    length = torch.linalg.vector_norm(lengths)
    whole = torch.linalg.vector_norm(wholes)
    slope = whole / length
    apart = (wholes / slope - lengths).abs()
    rests = torch.where((lengths == 0) & (wholes == 0), 0.0, rests)  # a block without a live row
    rest = torch.linalg.vector_norm(rests + apart)
    return _Block(torch.cat(labels), torch.cat(live), num_live.sum(), length, whole, slope, rest)


def _probabilities(z: Tensor) -> Tensor:
    return torch.softmax(z, 1, dtype=torch.promote_types(z.dtype, torch.float32))


def _hard_labels(p: Tensor, g: Tensor, live: Tensor, smoothing: float) -> Tensor:
    if not smoothing:  # of entries that are all zero, as of masked classes and a certain label, the likeliest
        return torch.add(g, p, alpha=-TINY).argmin(1)
    if p.shape[1] == 2:  # each row has the factor at one of the two, unless the model is too sure of the wrong class
        guess = torch.where(live, (g / (p - 0.5 * smoothing)).amax(1), torch.nan).nanmedian()
    else:
        guess = _steepest(p, g, smoothing / p.shape[1])
    return torch.addcmul(g, p, guess, value=-0.5).argmin(1)


def _steepest(p: Tensor, g: Tensor, least: float = 1e-3) -> Tensor:
    """A guess of a: no entry of g/p is above it, and entries far above their share of q come close to it."""
    return (g / p.clamp(min=least)).amax()


def _read_log_probabilities(z: Tensor, g: Tensor) -> Reading:
    tolerance = tolerance_of(z, g)
    g = wide(g)
    live = g.abs().amax(1) > 0
    num_live = live.sum(dtype=g.dtype)
    least, y = g.min(1)
    whole = torch.linalg.vector_norm(least)
    rest = torch.linalg.vector_norm(g.scatter(1, y[:, None], 0.0))
    apart = torch.linalg.vector_norm((least - least.sum() / num_live) * live)  # one factor for all rows
    normalized = ((torch.logsumexp(wide(z), 1).abs() <= 0.05) | ~live).all()  # which leaves room for bfloat16
    fits = (torch.maximum(rest, apart) <= tolerance * whole) & (whole > 0) & normalized
    return Reading(torch.where(live & fits, y, z.shape[1]), -least.sum(), fits, fits, num_live)


# ---- the first look, which chooses the form --------------------------------------------------------------------------


class Evidence(NamedTuple):
    """What a gradient says about its form, as numbers.

    Attributes:
        says: whether it tells forms apart: not all rows are certain.
        smoothing: the label smoothing.
        is_softmax: whether the logits are probabilities.
    """

    says: float
    smoothing: float
    is_softmax: float


def examine(z: Tensor, g: Tensor) -> Evidence:
    """Look for the form of rows of one gradient. Synchronizes once."""
    num_classes = z.shape[1]
    tolerance = tolerance_of(z, g)
    p = _probabilities(z)
    least = MIN_HALF_SMOOTHING if is_half(z, g) else MIN_SMOOTHING
    g = g.to(p.dtype)
    # Only rows in which a third class has a share tell the forms apart; two classes have to differ among the rows.
    top = p.topk(min(2, max(num_classes - 1, 1)), 1).values.sum(1)
    told = (g.abs().amax(1) > 0) & (top < (CERTAIN if num_classes > 2 else CERTAIN_OF_TWO))
    says = told.any()
    if num_classes == 2:
        spread = torch.where(told, top, -1.0).amax() - torch.where(told, top, 2.0).amin()
        says = says & (spread > max(MIN_SPREAD, 5.0 * tolerance))
    is_softmax = (z.amin() > 0) & sum_to_one(z, is_half(z, g))
    found = (says, _fit_smoothing(p * told[:, None], g * told[:, None], told, least), is_softmax)
    return Evidence(*torch.stack([value.to(p.dtype) for value in found]).tolist())


def _fit_smoothing(p: Tensor, g: Tensor, told: Tensor, least: float) -> Tensor:
    """The label smoothing; 0 if a line without a floor fits as well, or if it is smaller than the least.

    At all entries but the label's, g = a (p - f) is a line, with the floor f = smoothing / K.
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
        guess = (centered * g).sum() / (centered.square().sum() + TINY)
    floor = mean_p - mean_g / (guess + TINY)
    rest = torch.linalg.vector_norm((g - guess * (p - floor)) * others)
    through_zero = (p * g * others).sum() / ((p * others).square().sum() + TINY)
    without = torch.linalg.vector_norm((g - through_zero * p) * others)
    smoothing = floor * p.shape[1]
    is_needed = without > 2.0 * rest + 1e-5 * torch.linalg.vector_norm(g)
    found = is_needed & (smoothing > least) & (smoothing < MAX_SMOOTHING)
    return torch.where(found, smoothing, 0.0)
