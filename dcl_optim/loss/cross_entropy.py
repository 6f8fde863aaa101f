r"""Read labels and loss scale off the gradient that a softmax cross-entropy sends to its logits.

Take one row: logits z, probabilities p = softmax(z), targets q (a distribution). A cross-entropy that was multiplied by
:math:`a` sends the gradient

.. math:: g = a\,(p - q), \qquad \textstyle\sum_k g_k = 0.

*Hard.* With one label y and label smoothing :math:`\epsilon`, :math:`q = (1-\epsilon)\,e_y + \epsilon/K`. Without
smoothing the label is the only negative entry of g, so :math:`y = \arg\min g`. With smoothing it is the lowest entry of
:math:`g - \tfrac12 b\,p` for any b from :math:`2\epsilon a` to :math:`(4-2\epsilon)\,a`; the largest entry of g/p will
do, which is close to a and not above it. Then :math:`r = p - q` is known, and if all rows have the same factor,
:math:`a = \lVert g\rVert / \lVert r\rVert`. The loss has this form where :math:`\lVert g - a r\rVert` is rounding. A
mean over n rows has :math:`a = s/n`, so :math:`s = a\,n`, n being the rows whose gradient is not zero.

*Weighted.* Class weights, sample weights and focal losses give each row its own :math:`a_i = \lVert g_i\rVert / \lVert
r_i\rVert` (of a certain row without the label's entry), and :math:`s = \sum_i a_i`. Two classes put every row on some
line, so there all rows of a label need one a.

*Soft.* Mixup and CutMix: q has two large entries. Away from these, the two lowest entries of :math:`g - a\,p`,
:math:`g = a\,(p - f)` is a straight line, f being the floor :math:`\epsilon/K` that label smoothing adds; a is its
slope, and :math:`q = p - g/a` less the floor are the soft labels.

*Log-probabilities.* If the model ends in ``log_softmax``, ``NLLLoss`` gives :math:`g = -a\,e_y`.

*Negative.* Of any other loss that raises one logit of each row, the label is the only negative entry; s is not known.

All functions are pure and take rows (N, K) in float32 or wider. None reads a value, so nothing synchronizes.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dcl_optim._torch import constant

Kind = Literal["hard", "weighted", "soft", "log", "negative"]

TOLERANCE = 1e-3  # of |g - a r| / |g| in float32; the rounding of float32 leaves about 1e-6
HALF_TOLERANCE = 2e-2  # where z or g is in half precision; the rounding of bfloat16 leaves about 4e-3
ROUNDING = 1e-6  # of r in a row, in units of 1, where p is close to 1
SATURATED = 2e-5  # a row whose |r| is smaller says nothing about its factor
MIN_SMOOTHING = 2e-3  # a smaller one is rounding
MAX_SMOOTHING = 0.5
CERTAIN = 0.99  # a form is chosen from rows whose two highest probabilities sum to less
CERTAIN_OF_TWO = 0.9  # of two classes: from rows whose highest probability is smaller
MIN_SPREAD = 0.01  # of two classes: how far the labels' probabilities must be apart to tell a line from a point
READ_SHARE = 0.75  # of the live rows must have a label, or it is another loss
TINY = 1e-37


class Form(NamedTuple):
    """What kind of gradient a loss sends.

    Attributes:
        kind: which formula of the module's docstring applies.
        smoothing: the label smoothing :math:`\\epsilon`.
    """

    kind: Kind
    smoothing: float = 0.0


class Reading(NamedTuple):
    """What the gradient of one batch says, as tensors on its device.

    Attributes:
        labels: the label of each row (N,), K for none; for the soft form the soft labels (N, K), 0 in rows without.
        scale: s, a scalar.
        fits: whether the gradient has the form; if not, the labels and s mean nothing.
        tells_scale: whether s can be trusted too; not if all rows are so certain that rounding is all that is left.
    """

    labels: Tensor
    scale: Tensor
    fits: Tensor
    tells_scale: Tensor


def tolerance_of(*dtypes: torch.dtype) -> float:
    """The share of a gradient that rounding may leave unexplained."""
    return HALF_TOLERANCE if min(map(attrgetter("itemsize"), dtypes)) < 4 else TOLERANCE


def read(
    form: Form,
    z: Tensor,
    g: Tensor,
    live: Tensor,
    count: Tensor,
    tolerance: float = TOLERANCE,
    wants_labels: bool = True,
) -> Reading:
    """Read a gradient that has a known form.

    Args:
        form: the form.
        z, g: logits, rows (N, K), and the gradient of the loss with respect to them.
        live, count: whether the gradient of a row is not zero, (N,), and how many are; more if z and g are a selection.
        tolerance: see :func:`tolerance_of`.
        wants_labels: whether the labels are needed; if not, those of hard labels are left out.

    Examples:
        >>> z = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.5, 1.0]], requires_grad=True)
        >>> loss = 8.0 * torch.nn.functional.cross_entropy(z, torch.tensor([0, 2]))
        >>> (g,) = torch.autograd.grad(loss, z)
        >>> reading = read(Form("hard"), z.detach(), g, torch.tensor([True, True]), torch.tensor(2))
        >>> reading.labels, round(reading.scale.item(), 4), reading.fits
        (tensor([0, 2]), 8.0, tensor(True))
    """
    return READERS[form.kind](form, z, g, live, count, tolerance, wants_labels)


def _read_hard(
    form: Form, z: Tensor, g: Tensor, live: Tensor, count: Tensor, tolerance: float, wants_labels: bool
) -> Reading:
    p, smoothing = torch.softmax(z, 1), form.smoothing
    if smoothing:
        guess = _steepest(p, g, smoothing / z.shape[1])
        if z.shape[1] == 2:  # each row has it at one of the two, unless the model is too sure of the wrong class
            guess = torch.where(live, (g / (p - 0.5 * smoothing)).amax(1), torch.nan).nanmedian()
        y = torch.addcmul(g, p, guess, value=-0.5).argmin(1)
    else:  # of entries that are all zero, as of masked classes and a certain label, the likeliest
        y = torch.add(g, p, alpha=-TINY).argmin(1)
    r = p.scatter_(1, y[:, None], smoothing - 1.0, reduce="add")  # p - q
    if smoothing:
        r.sub_(smoothing / z.shape[1])
    length = torch.linalg.vector_norm(r.mul_(live[:, None]))
    slope = torch.linalg.vector_norm(g) / length
    rest = torch.linalg.vector_norm(torch.addcdiv(r, g, slope, value=-1.0))
    excess = torch.sub(rest, length, alpha=tolerance)
    fits = excess <= ROUNDING * math.sqrt(len(z))  # all rows may be certain, so that only rounding is left
    if wants_labels:
        y = torch.where(live & fits, y, constant(z.shape[1], y.device))
    return Reading(y, slope * count, fits, excess <= 0)


def _read_weighted(
    form: Form, z: Tensor, g: Tensor, live: Tensor, count: Tensor, tolerance: float, wants_labels: bool
) -> Reading:
    p = torch.softmax(z, 1)
    y = torch.addcmul(g, p, g.amax(1, keepdim=True), value=-ROUNDING).argmin(1, keepdim=True)  # on the row's scale
    order, least, keeps = 2, SATURATED, torch.ones_like(p)  # float16 rounds small entries more than large ones
    if tolerance < HALF_TOLERANCE:  # in p - 1 of a certain row rounding is all that is left; the others are exact
        order, least, keeps = 1, 0.0, keeps.scatter_(1, y, (p.gather(1, y) < CERTAIN).to(p))
    r = p.scatter_(1, y, -1.0, reduce="add").mul_(live[:, None])
    r, g = r.mul_(keeps), g * keeps
    whole, lengths = torch.linalg.vector_norm(g, order, dim=1), torch.linalg.vector_norm(r, order, dim=1)
    slopes = whole / lengths.clamp(min=TINY)
    rest = torch.linalg.vector_norm(torch.addcmul(g, r, slopes[:, None], value=-1.0), order, dim=1)
    clear = live & (lengths > least) & (rest <= tolerance * whole)
    number, y = clear.sum(), y[:, 0]
    mean = torch.where(clear, slopes, 0.0).sum() / number
    # A certain row has a label if its gradient is as small as rounding.
    certain = live & (lengths <= SATURATED) & (whole <= SATURATED * torch.where(number > 0, mean, torch.inf))
    told = clear | certain
    if z.shape[1] == 2:
        told = told & _is_one_slope_a_label(slopes, lengths, y, clear)
    needed = (READ_SHARE * live.sum()).clamp(min=1.0)
    fits = (told.sum() >= needed) & torch.isfinite(whole.sum())
    labels = torch.where(told & fits, y, z.shape[1])
    return Reading(labels, mean * count, fits, fits & (number >= needed))


def _is_one_slope_a_label(slopes: Tensor, lengths: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Whether, of two classes, the rows of each label share one slope, and are far enough apart to show it."""
    found = torch.ones_like(rows[:1])
    for label in (0, 1):
        mine = rows & (y == label)
        (low, high), (near, far) = (
            (torch.where(mine, t, torch.inf).amin(), torch.where(mine, t, 0.0).amax()) for t in (slopes, lengths)
        )
        found = found & (~mine.any() | ((high <= 1.01 * low) & (far > 1.02 * near)))
    return found


def _line(p: Tensor, g: Tensor, weights: Tensor, floor: Any) -> tuple[Tensor, Any]:
    """Fit g = a (p - f) over entries of weight 1: a, and f, which is the floor if there is one."""
    if floor is not None:
        centered = (p - floor) * weights
        return (centered * g).sum() / (centered.square().sum() + TINY), floor
    number = weights.sum() + TINY
    mean_p, mean_g = (p * weights).sum() / number, (g * weights).sum() / number
    slope, _ = _line(p, g, weights, mean_p)
    return slope, mean_p - mean_g / (slope + TINY)


def _rest_of_line(p: Tensor, g: Tensor, weights: Tensor, line: tuple[Tensor, Any]) -> Tensor:
    """The norm that a line leaves unexplained over entries of weight 1."""
    slope, floor = line
    return torch.linalg.vector_norm(torch.addcmul(g, p - floor, slope, value=-1.0) * weights)


def _others(
    p: Tensor, g: Tensor, live: Tensor, floor: float | None, labels: int, slope: Tensor
) -> tuple[Tensor, tuple[Tensor, Any]]:
    """1 at all entries but the labels', else 0; and the line through them, which a guess of its slope leads to.

    Of g - a p the lowest entries of a row are its labels. The line through the others is a better guess of a.
    """
    line, rows = (slope, floor), live[:, None].to(p.dtype).expand_as(p)
    others = rows
    for _ in range(2):
        lowest = torch.addcmul(g, p, line[0], value=-1.0).topk(labels, 1, largest=False).indices
        others = rows.scatter(1, lowest, 0.0)
        line = _line(p, g, others, floor)
    return others, line


def _steepest(p: Tensor, g: Tensor, least: float = 1e-3) -> Tensor:
    """A guess of a: no entry of g/p is above it, and entries far above their share of q come close to it."""
    return (g / p.clamp(min=least)).amax()


def _read_soft(
    form: Form, z: Tensor, g: Tensor, live: Tensor, count: Tensor, tolerance: float, wants_labels: bool
) -> Reading:
    p, classes, smoothing = torch.softmax(z, 1), z.shape[1], form.smoothing
    others, line = _others(p, g, live, smoothing / classes, 2, _steepest(p, g))
    slope, rest = line[0], _rest_of_line(p, g, others, line)
    shares = torch.addcdiv(p, g, slope, value=-1.0).sub_(smoothing / classes).div_(1.0 - smoothing)
    shares = shares.masked_fill(shares.abs() <= 5.0 * tolerance, 0.0)  # the rounding of p - g/a
    whole = torch.linalg.vector_norm(g * others)
    bound = tolerance * whole + ROUNDING * slope * math.sqrt(len(z))
    is_cross_entropy = g.sum(1).abs().sum() <= slope * (tolerance * len(z))  # over these classes: shares sum to 1
    fits = (slope > 0) & (rest <= bound) & (whole > SATURATED * slope) & is_cross_entropy
    return Reading(torch.where((live & fits)[:, None], shares, 0.0), slope * count, fits, fits)


def _read_log_probabilities(
    form: Form, z: Tensor, g: Tensor, live: Tensor, count: Tensor, tolerance: float, wants_labels: bool
) -> Reading:
    least, y = g.min(1)
    rest = torch.linalg.vector_norm(g.scatter(1, y[:, None], 0.0))
    whole = torch.linalg.vector_norm(least)
    normalized = ((torch.logsumexp(z, 1).abs() <= 0.05) | ~live).all()  # which leaves room for bfloat16
    fits = (rest <= tolerance * whole) & (whole > 0) & normalized
    scale = -least.sum() * (count / live.sum())
    return Reading(torch.where(live & fits, y, z.shape[1]), scale, fits, fits)


def _read_negative(
    form: Form, z: Tensor, g: Tensor, live: Tensor, count: Tensor, tolerance: float, wants_labels: bool
) -> Reading:
    one = (g < 0).sum(1) == 1
    fits = one.sum() >= (READ_SHARE * live.sum()).clamp(min=1.0)
    labels = torch.where(one & fits, g.argmin(1), g.shape[1])
    return Reading(labels, torch.ones_like(g[0, 0]), fits, torch.zeros_like(fits))


READERS = {
    "hard": _read_hard,
    "weighted": _read_weighted,
    "soft": _read_soft,
    "log": _read_log_probabilities,
    "negative": _read_negative,
}


class Evidence(NamedTuple):
    """What one gradient says about its form, as numbers on its device.

    Attributes:
        total: the sum of absolute values.
        says: whether it tells forms apart: not all rows are certain.
        smoothing: the label smoothing, if the labels are hard.
        mixed_smoothing: the label smoothing, if the labels are soft.
        mixed: whether hard labels, which may fit too, would mostly be classes that the model thinks unlikely.
        weighted: 1 if the weighted form fits, 2 if it fits every row, 3 if then s is another than that of hard labels.
    """

    total: Any
    says: Any
    smoothing: Any
    mixed_smoothing: Any
    mixed: Any
    weighted: Any


def examine(z: Tensor, g: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Look for the form of one gradient: an :class:`Evidence` as a vector, so that one synchronization reads all.

    The arguments are as in :func:`read`.
    """
    classes = z.shape[1]
    size, p = torch.linalg.vector_norm(g, ord=1, dim=1), torch.softmax(z, 1)
    # Only rows in which a third class has a share tell the forms apart; two classes have to differ among the rows.
    top = p.topk(min(2, classes - 1), 1).values.sum(1)
    live = (size > 0) & (top < (CERTAIN if classes > 2 else CERTAIN_OF_TWO))
    says = live.any()
    if classes == 2:
        spread = torch.where(live, top, -1.0).amax() - torch.where(live, top, 2.0).amin()
        says = says & (spread > max(MIN_SPREAD, 5.0 * tolerance))
    # What tells class weights from none may be the rows that are certain.
    hard, rows = (read(Form(kind), z, g, size > 0, (size > 0).sum(), tolerance).scale for kind in ("hard", "weighted"))
    differ = ((hard - rows).abs() > 5.0 * tolerance * rows) & (tolerance < HALF_TOLERANCE)
    unlikely = live & (p.gather(1, g.argmin(1, keepdim=True))[:, 0] < 0.1 * p.amax(1))
    z, g, p, count = z * live[:, None], g * live[:, None], p * live[:, None], live.sum()
    smoothing, mixed_smoothing = (_fit_smoothing(p, g, live, labels) for labels in (1, min(2, classes)))
    found = read(Form("weighted"), z, g, live, count, tolerance)
    weighted = found.fits * (1 + ((found.labels < classes) | ~live).all() * (1 + differ))
    evidence = (size.sum(), says, smoothing, mixed_smoothing, unlikely.sum() > 0.5 * count, weighted)
    return torch.stack([value.double() for value in evidence])


def _fit_smoothing(p: Tensor, g: Tensor, live: Tensor, labels: int) -> Tensor:
    """The label smoothing of rows with this many labels each; 0 if a line without a floor fits as well."""
    # A label that is too certain for a smoothed target has the highest entry of g. The line through the entries between
    # the highest and the lowest ones is then the better guess.
    lowest, highest = g.topk(labels, 1, largest=False).indices, g.argmax(1, keepdim=True)
    between = live[:, None].to(p.dtype).expand_as(p).scatter(1, lowest, 0.0).scatter(1, highest, 0.0)
    slope = torch.maximum(_line(p, g, between, None)[0], _steepest(p, g))
    others, line = _others(p, g, live, None, labels, slope)
    smoothing = line[1] * p.shape[1]
    without = _rest_of_line(p, g, others, _line(p, g, others, 0.0))
    needed = without > 2.0 * _rest_of_line(p, g, others, line) + 1e-5 * torch.linalg.vector_norm(g)
    found = needed & (smoothing > MIN_SMOOTHING) & (smoothing < MAX_SMOOTHING)
    return torch.where(found, smoothing, 0.0)


def candidates(evidence: Evidence, classes: int, former: Form | None, allows_negative: bool) -> list[tuple[int, Form]]:
    """The forms that may apply, each with its rank in the order in which they are tried.

    Of the forms that fit the simplest is taken, but a script that mixed labels before goes on with soft labels, which
    contain hard ones. A fitted model with mixed labels looks like one that is sure of the wrong class: soft labels hold
    both.
    """
    if not evidence.says or classes < 2:
        return []
    soft, may_be_soft = Form("soft", evidence.mixed_smoothing), classes >= 5
    forms = (
        (may_be_soft and (evidence.mixed or (former is not None and former.kind == "soft")), soft),
        (evidence.smoothing, Form("hard", evidence.smoothing)),
        (evidence.weighted == 3, Form("weighted")),
        (True, Form("hard")),
        (evidence.weighted == 2, Form("weighted")),
        (may_be_soft, soft),
        (evidence.weighted, Form("weighted")),
        (True, Form("log")),
        (allows_negative, Form("negative")),
    )
    return [(rank, form) for rank, (applies, form) in enumerate(forms) if applies]
