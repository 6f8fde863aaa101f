r"""Read labels and the factor on the loss off the gradient that a softmax cross-entropy sends to its logits.

Take one row: logits z, probabilities p = softmax(z), label y, label smoothing :math:`\epsilon`, K classes. A
cross-entropy that was multiplied by :math:`a` sends the gradient

.. math:: g = a\,(p - q), \qquad q = (1-\epsilon)\,e_y + \epsilon/K, \qquad \textstyle\sum_k g_k = 0.

Every smoothing has this form, also one that is spread over the other classes alone: then :math:`\epsilon` is K/(K - 1)
times what the script has written.

**Label.** Without smoothing it is the only negative entry of g, so :math:`y = \arg\min g`. With smoothing all entries
of a row but the label's have :math:`g = a\,(p - \epsilon/K)`, so that a is the median of these ratios, also of three
classes alone. Then :math:`g - a\,(p - \epsilon/K)` is 0, but for the label's entry, which is
:math:`-a\,(1-\epsilon)`: it is the lowest, and it is so with any b from :math:`\epsilon a` to :math:`(2-\epsilon)\,a`
in place of a.

**Factor.** All rows have the same a. Without smoothing it is :math:`\lVert g\rVert / \lVert r\rVert`, with
:math:`r = p - q`. With smoothing it is the median above, as long as the batch has the form's :math:`\epsilon` to the
last digits: in float32 with at most ``FEW`` classes. The labels' entries follow from the others, as rows sum to 0, so
they are left out of what is compared.

Otherwise a batch's smoothing differs a little from the form's, and a model that fits may have all p near
:math:`\epsilon/K`, where the ratio is rounding. To find the labels a b of one and a half times the largest entry of g
will do there, which is never above 1.5a. All other entries lie on the line :math:`g = a\,x + c` with
:math:`x = p - \epsilon/K`. Its slope is a, and c is a times what :math:`\epsilon/K` differs by:

.. math:: a = \frac{\sum (x - m)\,g}{\sum (x - m)\,x}, \qquad m = \frac{\sum x}{M + \sigma^2/\tau^2},

the sums being those over the M = n (K - 1) entries of the n rows whose gradient is not zero. An entry of g is off by u
of itself at most (u: see below), and so is a by about u where x varies by as much as its length. Where x hardly varies
the form's own :math:`\epsilon` measures c, too: c is 0, up to :math:`\tau = 3u\,a\,\epsilon/K` (see below). An entry
of g has noise of about :math:`u/\sqrt 6` of itself, :math:`\sigma^2 = u^2 a^2 \lVert x\rVert^2 / (6M)`. So u cancels:
:math:`\sigma^2/\tau^2 = K^2 \lVert x\rVert^2 / (54\,\epsilon^2 M)`. A c of at most a tenth of :math:`a\,\epsilon/K`
(``MAX_SHIFT``) is no part of what is left unexplained.

A mean over n rows has :math:`a = s/n`, so :math:`s = a\,n`, n being the rows whose gradient is not zero. The last s
stands in where a batch tells none: where it does not fit, and where the length of r tells it and only rounding is left
of r.

**Form.** The loss has this form where what is left of g is rounding. If the model ends in ``log_softmax``,
``NLLLoss`` gives :math:`g = -a\,e_y`. Log-probabilities have no softmax: with p = 0 the same formulas read them.

Rows with different factors (class and sample weights, focal and symmetric losses) or with several classes (mixup) have
another form. No gradient tells these losses apart, nor what they were multiplied by.

**Rounding.** Let u be the unit roundoff of the narrower dtype of z and g: :math:`2^{-8}` in bfloat16,
:math:`2^{-11}` in float16, :math:`2^{-24}` in float32.

- Every entry of g is rounded once, by at most u of itself, so :math:`\lVert g - a r\rVert \le u\,\lVert g\rVert`, in
  practice about u/2: the tolerance is u, or 0.001 where that is more.
- A sum of K numbers that are not negative, one after the other in float32, is off by at most :math:`K\,2^{-24}` of
  itself, and by nearly as much if they are equal, since each addition rounds alike. A softmax divides by such a sum,
  and with smoothing the backward pass multiplies p by one of K equal gradients :math:`\epsilon/K`: then
  :math:`g = a\,(p(1+\delta) - q)` with :math:`\lvert\delta\rvert \le K\,2^{-24}`, and as p is at most 1 a row of r is
  off by as much. To that come :math:`10^{-6}` for the exponentials. On a CPU torch adds so along a dimension that is
  not the last, and in lanes along the last one. So a form includes the layout in which the softmax is taken: with the
  right one p has the errors that it has in the loss.
- Where the labels' entries are left out, p is x and :math:`\epsilon/K`. Of these :math:`\delta` is a share, which adds
  to the tolerance: x is not much shorter than :math:`\epsilon/K`, of a model that is trained.
- In float16 an entry below :math:`2^{-14}` is rounded by up to :math:`2^{-25}`. A gradient scaler keeps it above.
- torch computes p from z in float32 if the loss runs under autocast or takes ``z.float()``. On logits in half precision
  it rounds :math:`\log p` to their dtype, and then :math:`p = \exp(\mathrm{round}(\log p))` is off by up to
  :math:`u\,\lvert\log p\rvert` of itself: 3 % where p is 0.001, which is most of r once the model fits. So a form
  includes the arithmetic of the softmax too; with the right one p is exact. Its rows do not sum to 1, but to
  :math:`1 \pm u`, and an error of the slope, about u, multiplies that in the label's entry: up to :math:`4u^2`.
- With smoothing in half precision each log-probability gets the gradient
  :math:`\mathrm{round}(\mathrm{round}(\epsilon/K)/n)`, and the label's three roundings more. The sum of them multiplies
  p, so that g has the form again, with another smoothing: by up to :math:`3u` of :math:`\epsilon`, much less than the
  tenth by which a batch's may differ.

All functions are pure, take rows (N, K) of logits and gradient, and compute in float32 or wider. None but those of the
first look reads a value.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim.penalty.layout import wide
from dcl_optim.pytorch.internals import constant

LOG = -1.0  # in place of a label smoothing: the form of log-probabilities

TOLERANCE = 1e-3  # of |g - a r| / |g|, and more in bfloat16; the rounding of float32 leaves about 1e-6
ROUNDING = 1e-6  # of r in a row, in units of 1, where p is close to 1
MAX_SMOOTHING = 0.5
NORMALIZED = 0.05  # of the logarithm of the sum of probabilities, which leaves room for bfloat16
CERTAIN = 0.99  # a form is chosen from rows whose two highest probabilities sum to less
CERTAIN_OF_TWO = 0.9  # of two classes: from rows whose highest probability is smaller
MIN_SPREAD = 0.01  # of two classes: how far the labels' probabilities must be apart to tell one factor from several
TINY = 1e-37
FEW = 512  # classes, whose sums in float32 are right to the last digits
MAX_SHIFT = 0.1  # of the form's smoothing, by which that of a batch may differ
RIDGE = 1e-4  # of m, which decides where float32 leaves no digits of x - m
HALF_STEP = 2.0**-25  # by which an entry of float16 is rounded, however small it is

Norm = Callable[[Tensor], Tensor]
Found = tuple[Tensor, Tensor, Tensor, Tensor]  # the labels, a, and the lengths of what is left of g and of g
PART = 2**18  # numbers of which a CPU's norm in float32 is wrong by at most 0.03 %; of 8M by 0.8 %


class Form(NamedTuple):
    """The form of a gradient.

    Attributes:
        smoothing: the label smoothing, or ``LOG``.
        in_float32: whether the loss takes the softmax in float32 or wider; if not, in the logits' own dtype.
        classes_last: whether it takes the softmax along the last dimension.
    """

    smoothing: float
    in_float32: bool = True
    classes_last: bool = True


class Reading(NamedTuple):
    """What the gradient of one batch says, as tensors on its device.

    Attributes:
        labels: the label of each row (N,), K for none.
        scale: s, a scalar; the last one if the gradient does not tell it.
        fits: whether the gradient has the form; if not, no row has a label.
        told: whether it tells s: it fits, and without smoothing more than rounding is left of r.
        num_live: how many rows have a gradient.
        rest: the length of what the form leaves unexplained.
    """

    labels: Tensor
    scale: Tensor
    fits: Tensor
    told: Tensor
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
    tolerance = tolerance_of(z.dtype, g.dtype)
    varies = smoothing > 0.0 and (min(z.dtype.itemsize, g.dtype.itemsize) < 4 or num_classes > FEW)
    rounding = rounding_of(form.in_float32, z.dtype, num_classes)
    # A comparison with a number makes a tensor of it first.
    zero = constant(0.0, z.device)
    steps = constant(HALF_STEP * math.sqrt(z.numel()) if g.dtype == torch.float16 else 0.0, z.device)
    g = g.to(wide_dtype(g.dtype))
    # Not zero if an entry is not: a row sums to 0, or in half precision may be negative as a whole.
    live = (g.amin(1) if form.smoothing == LOG else g.amax(1)).ne_(zero)
    num_live = live.sum()
    p = _probabilities(form, z)
    if varies:
        y, a, rest, whole = _read_varying(p, g, live, num_live, smoothing, norm)
    elif smoothing:
        y, a, rest, whole = _read_smoothed(p, g, live, smoothing, norm)
    else:
        y, a, rest, whole = _read_hard(p, g, live, norm)
    scale = a * num_live
    if smoothing:  # no label's entry is compared, so that rounding is a share of the others
        told = fits = torch.sub(rest, whole, alpha=tolerance + rounding) <= steps
    else:
        excess = torch.sub(rest, whole, alpha=tolerance)
        told = excess <= zero
        # All rows may be certain, so that only rounding is left of r. A larger a would explain any gradient by it, and
        # the last one any that is much smaller than before.
        least_scale = scale if last_scale is None else torch.minimum(scale, last_scale)
        fits = torch.addcdiv(excess, least_scale, num_live, value=-rounding * math.sqrt(num_rows)) <= steps
    if form.smoothing == LOG:
        fits = fits & ((torch.logsumexp(wide(z), 1) * live).abs() <= NORMALIZED).all()
    scale = torch.where(told, scale, 1.0 if last_scale is None else last_scale)
    if wants_labels:
        y = torch.where(torch.logical_and(live, fits), y, constant(num_classes, z.device))
    return Reading(y, scale, fits, told, num_live, rest)


@functools.cache
def tolerance_of(z: torch.dtype, g: torch.dtype) -> float:
    """The share of a gradient that rounding may leave unexplained, for these dtypes of logits and gradient."""
    return max(TOLERANCE, _roundoff_of(z, g))


def _norm_by_rows(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(torch.linalg.vector_norm(rows, dim=1))


@functools.cache
def _roundoff_of(*dtypes: torch.dtype) -> float:
    """The unit roundoff of the narrowest dtype."""
    return max(torch.finfo(dtype).eps for dtype in dtypes) / 2.0


@functools.cache
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or a wider dtype, in which values of a dtype are computed with."""
    return torch.promote_types(dtype, torch.float32)


@functools.cache
def rounding_of(in_float32: bool, dtype: torch.dtype, num_classes: int) -> float:
    """How far r may be off in each row of logits of this dtype, by the arithmetic of the softmax."""
    rounding = ROUNDING + num_classes * _roundoff_of(wide_dtype(dtype))
    return rounding if in_float32 else rounding + 4.0 * _roundoff_of(dtype) ** 2


def _probabilities(form: Form, z: Tensor) -> Tensor:
    """The softmax as the loss takes it, in float32 or wider; 0 of log-probabilities."""
    if form.smoothing == LOG:
        return torch.zeros_like(z, dtype=wide_dtype(z.dtype))
    dtype = wide_dtype(z.dtype) if form.in_float32 else z.dtype
    if not form.classes_last:
        return wide(torch.log_softmax(z.t(), 0, dtype=dtype)).exp_().t()
    if form.in_float32:
        return torch.softmax(z, 1, dtype=dtype)
    return wide(torch.log_softmax(z, 1)).exp_()


def _read_hard(p: Tensor, g: Tensor, live: Tensor, norm: Norm) -> Found:
    """Read labels without a smoothing. Like the next two it writes to p, and gives nan where no row is live."""
    y = torch.add(g, p, alpha=-TINY).argmin(1)  # of entries that are all zero, as of a certain label, the likeliest
    r = p.scatter_(1, y.unsqueeze(1), -1.0, reduce="add").mul_(live.unsqueeze(1))
    whole = norm(g)
    a = whole / norm(r)
    return y, a, norm(torch.addcmul(g, r, a, value=-1.0, out=r)), whole


def _read_smoothed(p: Tensor, g: Tensor, live: Tensor, smoothing: float, norm: Norm) -> Found:
    """Read labels that have this smoothing to the last digits."""
    x = _less_share(p, live, smoothing)
    a = _median_ratio(x, g)
    left = torch.addcmul(g, x, a, value=-1.0, out=x)
    y = left.argmin(1)
    return y, a, norm(left.scatter_(1, y.unsqueeze(1), 0.0)), norm(g)


def _read_varying(p: Tensor, g: Tensor, live: Tensor, num_live: Tensor, smoothing: float, norm: Norm) -> Found:
    """Read labels that have about this smoothing, by the line through the others' entries."""
    num_classes = p.shape[1]
    x = _less_share(p, live, smoothing)
    y = _labels(x, g, torch.maximum(_median_ratio(x, g), 3.0 * g.amax()))
    x.scatter_(1, y.unsqueeze(1), 0.0)
    g = g.scatter(1, y.unsqueeze(1), 0.0)
    number = num_live * (num_classes - 1)
    squares = norm(x).square()
    sum_x = x.sum()
    sum_g = g.sum()
    prior = (num_classes / smoothing) ** 2 / 54.0
    mean_x = sum_x / torch.addcdiv(number, squares, number, value=prior)
    product = torch.addcmul((g * x).sum(), sum_g, mean_x, value=RIDGE - 1.0)
    a = product / torch.addcmul(squares, sum_x, mean_x, value=RIDGE - 1.0)
    left = torch.addcmul(g, x, a, value=-1.0, out=x)
    sum_left = torch.addcmul(sum_g, sum_x, a, value=-1.0)
    most = MAX_SHIFT * smoothing / num_classes
    c = a * (sum_left / (a * number)).clamp_(-most, most)
    rest = torch.addcmul(norm(left).square(), sum_left, c, value=-1.0).clamp_(min=0.0).sqrt_()
    return y, a, rest, norm(g)


def _less_share(p: Tensor, live: Tensor, smoothing: float) -> Tensor:
    """p less the share of the smoothing, which is r but for the labels' entries; 0 in other rows."""
    live = live.unsqueeze(1)
    return p.mul_(live).sub_(live, alpha=smoothing / p.shape[1])


def _median_ratio(x: Tensor, g: Tensor) -> Tensor:
    # Of three entries one at most is the label's, and the others' ratio is the factor; nan where no row is live.
    ratios = g[:, :3] / x[:, :3]
    if x.shape[1] == 2:  # the label's is the lower one, unless the model is too sure of the wrong class
        ratios = ratios.amax(1)
    return ratios.nanmedian()


def _labels(p: Tensor, g: Tensor, a: Tensor) -> Tensor:
    """The labels by a guess of a."""
    return torch.addcmul(g, p, a, value=-0.5).argmin(1)


# ---- the first look, which chooses the form --------------------------------------------------------------------------


def tells_form(z: Tensor, g: Tensor) -> bool:
    """Whether rows tell forms apart: one is not certain. Synchronizes.

    In such a row a third class has a share; two classes have to differ among the rows.
    """
    p = torch.softmax(wide(z), 1)
    num_open = int(p.count_nonzero(1).amax())  # of the others a mask has taken the share
    if num_open > 2:
        return bool((p.topk(2, 1).values.sum(1) < CERTAIN).any())
    top = p.amax(1)
    top = top[top < CERTAIN_OF_TWO]
    return len(top) > 1 and bool(top.amax() - top.amin() > max(MIN_SPREAD, 5.0 * tolerance_of(z.dtype, g.dtype)))


def choices(z: Tensor, g: Tensor) -> list[Form]:
    """Forms that a loss may have: of log-probabilities, without a smoothing, and with those that fit. Synchronizes."""
    forms = [Form(LOG)]
    for hard in with_each_softmax(0.0, z):
        forms += [hard]
        for smoothing in _fitted_smoothings(_probabilities(hard, z), wide(g)):
            if 2.0 * tolerance_of(z.dtype, g.dtype) < smoothing <= MAX_SMOOTHING:
                forms += [hard._replace(smoothing=smoothing)]
    return forms


def with_each_softmax(smoothing: float, z: Tensor) -> list[Form]:
    """The forms with a smoothing, for each arithmetic and layout that a loss may have.

    In float32 the sum of few numbers is the same along both, but for the last digit.
    """
    if z.dtype.itemsize >= 4:
        return [Form(smoothing), Form(smoothing, True, False)][: 2 if z.shape[1] > FEW else 1]
    return [Form(smoothing, *options) for options in itertools.product((True, False), (True, False))]


def best(readings: dict[Form, Reading]) -> Form | None:
    """The form that leaves the least of a gradient, or a plainer one that leaves hardly more. Synchronizes."""
    weighed = {
        form: float(reading.rest) * (2.0 if form.smoothing else 1.0) * (1.0 if form.classes_last else 1.1)
        for form, reading in readings.items()
        if bool(reading.fits)
    }
    return min(weighed, key=weighed.__getitem__, default=None)


def is_beyond_doubt(form: Form, z: Tensor, g: Tensor) -> bool:
    """Whether rows of which the model is certain have a form as surely as others. Synchronizes.

    Not too few numbers for factor and smoothing; nor rows that are all alike, which have the form with any factor, also
    mixed ones; nor a smoothing of two classes of which all predictions are alike, which may as well be class weights.
    """
    if form.smoothing and z.shape[1] == 2:
        top = torch.softmax(wide(z), 1).amax(1)
        if top.amax() - top.amin() < MIN_SPREAD:
            return False
    return len(z) * (z.shape[1] - 1) >= 4 and _differ(g.abs().amax(1))


def each_row_fits(form: Form, z: Tensor, g: Tensor) -> bool:
    """Whether each row has a form by itself, as a batch has it that is beyond doubt. Synchronizes.

    A long row may outweigh the others, so that the length of all does not show that their factors differ. Two rows that
    are no rounding must differ, too.
    """
    num_classes = z.shape[1]
    reading = read(form, z, g)
    factor = reading.scale / len(z)
    labels = F.one_hot(reading.labels.clamp(max=num_classes - 1), num_classes)
    r = _probabilities(form, z) - (1.0 - form.smoothing) * labels - form.smoothing / num_classes
    size = torch.linalg.vector_norm(wide(g), dim=1)
    told = tolerance_of(z.dtype, g.dtype) * size
    rounding = factor * rounding_of(form.in_float32, z.dtype, num_classes)
    allowed = told + rounding
    if form.smoothing:  # which was fitted to all rows
        allowed += told.square().mean().sqrt()
    fit = torch.linalg.vector_norm(wide(g) - factor * r, dim=1) <= allowed
    return _differ(size[told > rounding]) and bool(fit.all())


def _differ(size: Tensor) -> bool:
    """Whether rows differ in length, by a tenth."""
    return len(size) > 1 and bool(size.amax() > 1.1 * size.amin())


def _fitted_smoothings(p: Tensor, g: Tensor) -> list[float]:
    """Smoothings, nan for none: at all entries but the label's g = a (p - smoothing / K), which is a line.

    The labels are guessed at first by the largest entry of g/p. It is about a if an entry other than a label's is far
    above its share of q, and far below a if all labels are surer than q. Then they are the likeliest classes.
    """
    found = []
    steepest = (g / p.clamp(min=1e-3)).amax()
    for y in (_labels(p, g, steepest), p.argmax(1)):
        for _ in range(2):  # the line through the others is a better guess of a
            others = torch.ones_like(p).scatter_(1, y.unsqueeze(1), 0.0)
            mean_p = (p * others).sum() / others.sum()
            mean_g = (g * others).sum() / others.sum()
            centered = (p - mean_p) * others
            a = (centered * (g - mean_g)).sum() / centered.square().sum()
            y = _labels(p, g, a)
        found.append(float((mean_p - mean_g / a) * p.shape[1]))
    return found
