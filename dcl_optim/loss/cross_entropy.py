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

All functions are pure, take :class:`Gradient`, and compute in float32 or wider. None reads a value, so nothing
synchronizes.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dcl_optim._torch import constant
from dcl_optim.distances import wide

Kind = Literal["hard", "weighted", "soft", "log"]

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
MIN_CLASSES_OF_SOFT = 5  # with fewer classes too few entries lie on the line of mixed labels
TINY = 1e-37


class Form(NamedTuple):
    """What kind of gradient a loss sends.

    Attributes:
        kind: which formula of the module's docstring applies.
        smoothing: the label smoothing :math:`\\epsilon`.
    """

    kind: Kind
    smoothing: float = 0.0


class Gradient(NamedTuple):
    """A gradient of the logits, as rows.

    Attributes:
        z, g: logits, rows (N, K), and the gradient of the loss with respect to them, in the dtypes of the script.
        live: whether the gradient of a row is not zero, (N,).
        num_live: how many rows are live; more than that if z and g are a selection of all rows.
        tolerance: the share of a gradient that rounding may leave unexplained; see :func:`tolerance_of`.
    """

    z: Tensor
    g: Tensor
    live: Tensor
    num_live: Tensor
    tolerance: float = TOLERANCE


class Reading(NamedTuple):
    """What the gradient of one batch says, as tensors on its device.

    Attributes:
        labels: the label of each row (N,), K for none; for the soft form the soft labels (N, K), 0 in rows without.
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


def tolerance_of(*dtypes: torch.dtype) -> float:
    """The share of a gradient that rounding may leave unexplained."""
    return HALF_TOLERANCE if min(map(attrgetter("itemsize"), dtypes)) < 4 else TOLERANCE


def read(form: Form, gradient: Gradient, wants_labels: bool = True) -> Reading:
    """Read a gradient that has a known form.

    Args:
        form: the form.
        gradient: logits and gradient.
        wants_labels: whether the labels are needed; if not, those of hard labels are left out.

    Examples:
        >>> z = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.5, 1.0]], requires_grad=True)
        >>> loss = 8.0 * torch.nn.functional.cross_entropy(z, torch.tensor([0, 2]))
        >>> (g,) = torch.autograd.grad(loss, z)
        >>> gradient = Gradient(z.detach(), g, torch.tensor([True, True]), torch.tensor(2))
        >>> reading = read(Form("hard"), gradient)
        >>> reading.labels, round(reading.scale.item(), 4), reading.fits
        (tensor([0, 2]), 8.0, tensor(True))
    """
    if form.kind == "hard":
        return _read_hard(gradient, form.smoothing, wants_labels)
    if form.kind == "weighted":
        return _read_weighted(gradient)
    if form.kind == "soft":
        return _read_soft(gradient, form.smoothing)
    return _read_log_probabilities(gradient)


def _probabilities(z: Tensor) -> Tensor:
    return torch.softmax(z, 1, dtype=torch.promote_types(z.dtype, torch.float32))


def _read_hard(gradient: Gradient, smoothing: float, wants_labels: bool) -> Reading:
    z, g, live, num_live, tolerance = gradient  # g is not copied to a wider dtype: with many classes it is large
    num_classes = z.shape[1]
    p = _probabilities(z)
    y = _hard_labels(p, g, live, smoothing)
    r = p.scatter_(1, y[:, None], smoothing - 1.0, reduce="add")  # p - q
    if smoothing:
        r.sub_(smoothing / num_classes)
    length = torch.linalg.vector_norm(r.mul_(live[:, None]))
    slope = torch.linalg.vector_norm(g, dtype=p.dtype) / length
    rest = torch.linalg.vector_norm(torch.addcdiv(r, g, slope, value=-1.0))
    excess = torch.sub(rest, length, alpha=tolerance)
    fits = excess <= ROUNDING * math.sqrt(len(z))  # all rows may be certain, so that only rounding is left
    if wants_labels:
        y = torch.where(live & fits, y, constant(num_classes, y.device))
    return Reading(y, slope * num_live, fits, excess <= 0, num_live)


def _hard_labels(p: Tensor, g: Tensor, live: Tensor, smoothing: float) -> Tensor:
    if not smoothing:  # of entries that are all zero, as of masked classes and a certain label, the likeliest
        return torch.add(g, p, alpha=-TINY).argmin(1)
    if p.shape[1] == 2:  # each row has the factor at one of the two, unless the model is too sure of the wrong class
        guess = torch.where(live, (g / (p - 0.5 * smoothing)).amax(1), torch.nan).nanmedian()
    else:
        guess = _steepest(p, g, smoothing / p.shape[1])
    return torch.addcmul(g, p, guess, value=-0.5).argmin(1)


def _read_weighted(gradient: Gradient) -> Reading:
    z, g, live, num_live, tolerance = gradient
    num_classes = z.shape[1]
    p = _probabilities(z)
    g = wide(g)
    y = torch.addcmul(g, p, g.amax(1, keepdim=True), value=-ROUNDING).argmin(1, keepdim=True)  # on the row's scale
    if tolerance < HALF_TOLERANCE:  # in p - 1 of a certain row rounding is all that is left; the others are exact
        order = 1
        least = 0.0
        keeps = torch.ones_like(p).scatter_(1, y, (p.gather(1, y) < CERTAIN).to(p))
    else:  # float16 rounds small entries more than large ones
        order = 2
        least = SATURATED
        keeps = torch.ones_like(p)
    r = p.scatter_(1, y, -1.0, reduce="add").mul_(live[:, None]).mul_(keeps)
    g = g * keeps
    whole = torch.linalg.vector_norm(g, order, dim=1)
    lengths = torch.linalg.vector_norm(r, order, dim=1)
    slopes = whole / lengths.clamp(min=TINY)
    rest = torch.linalg.vector_norm(torch.addcmul(g, r, slopes[:, None], value=-1.0), order, dim=1)
    clear = live & (lengths > least) & (rest <= tolerance * whole)
    y = y[:, 0]
    num_clear = clear.sum()
    mean = torch.where(clear, slopes, 0.0).sum() / num_clear
    # A certain row has a label if its gradient is as small as rounding.
    certain = live & (lengths <= SATURATED) & (whole <= SATURATED * torch.where(num_clear > 0, mean, torch.inf))
    told = clear | certain
    if num_classes == 2:
        told = told & _is_one_slope_a_label(slopes, lengths, y, clear)
    needed = (READ_SHARE * live.sum()).clamp(min=1.0)
    fits = (told.sum() >= needed) & torch.isfinite(whole.sum())
    labels = torch.where(told & fits, y, num_classes)
    return Reading(labels, mean * num_live, fits, fits & (num_clear >= needed), num_live)


def _is_one_slope_a_label(slopes: Tensor, lengths: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Whether, of two classes, the rows of each label have one slope, and those of one label are apart enough to show.

    One row, or rows close together, show nothing. Without any of these rows nothing contradicts.
    """
    share = []
    are_apart = []
    for label in (0, 1):
        mine = rows & (y == label)
        low = torch.where(mine, slopes, torch.inf).amin()
        high = torch.where(mine, slopes, 0.0).amax()
        near = torch.where(mine, lengths, torch.inf).amin()
        far = torch.where(mine, lengths, 0.0).amax()
        share.append(high <= 1.01 * low)
        are_apart.append(far > 1.02 * near)
    return share[0] & share[1] & (are_apart[0] | are_apart[1] | ~rows.any())


def _line(p: Tensor, g: Tensor, weights: Tensor, floor: Any) -> tuple[Tensor, Any]:
    """Fit g = a (p - f) over entries of weight 1: a, and f, which is the floor if there is one."""
    if floor is not None:
        centered = (p - floor) * weights
        return (centered * g).sum() / (centered.square().sum() + TINY), floor
    total = weights.sum() + TINY
    mean_p = (p * weights).sum() / total
    mean_g = (g * weights).sum() / total
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
    line: tuple[Tensor, Any] = (slope, floor)
    rows = live[:, None].to(p.dtype).expand_as(p)
    others = rows
    for _ in range(2):
        lowest = torch.addcmul(g, p, line[0], value=-1.0).topk(labels, 1, largest=False).indices
        others = rows.scatter(1, lowest, 0.0)
        line = _line(p, g, others, floor)
    return others, line


def _steepest(p: Tensor, g: Tensor, least: float = 1e-3) -> Tensor:
    """A guess of a: no entry of g/p is above it, and entries far above their share of q come close to it."""
    return (g / p.clamp(min=least)).amax()


def _read_soft(gradient: Gradient, smoothing: float) -> Reading:
    z, g, live, num_live, tolerance = gradient
    p = _probabilities(z)
    g = wide(g)
    floor = smoothing / z.shape[1]
    others, line = _others(p, g, live, floor, 2, _steepest(p, g))
    slope = line[0]
    rest = _rest_of_line(p, g, others, line)
    shares = torch.addcdiv(p, g, slope, value=-1.0).sub_(floor).div_(1.0 - smoothing)
    shares = shares.masked_fill(shares.abs() <= 5.0 * tolerance, 0.0)  # the rounding of p - g/a
    whole = torch.linalg.vector_norm(g * others)
    bound = tolerance * whole + ROUNDING * slope * math.sqrt(len(z))
    is_cross_entropy = g.sum(1).abs().sum() <= slope * (tolerance * len(z))  # over these classes: shares sum to 1
    fits = (slope > 0) & (rest <= bound) & (whole > SATURATED * slope) & is_cross_entropy
    return Reading(torch.where((live & fits)[:, None], shares, 0.0), slope * num_live, fits, fits, num_live)


def _read_log_probabilities(gradient: Gradient) -> Reading:
    z, g, live, num_live, tolerance = gradient
    g = wide(g)
    least, y = g.min(1)
    rest = torch.linalg.vector_norm(g.scatter(1, y[:, None], 0.0))
    whole = torch.linalg.vector_norm(least)
    normalized = ((torch.logsumexp(wide(z), 1).abs() <= 0.05) | ~live).all()  # which leaves room for bfloat16
    fits = (rest <= tolerance * whole) & (whole > 0) & normalized
    scale = -least.sum() * (num_live / live.sum())
    return Reading(torch.where(live & fits, y, z.shape[1]), scale, fits, fits, num_live)


class Evidence(NamedTuple):
    """What one gradient says about its form, as numbers or as scalar tensors.

    Attributes:
        total: the sum of absolute values.
        says: whether it tells forms apart: not all rows are certain.
        smoothing: the label smoothing, if the labels are hard.
        mixed_smoothing: the label smoothing, if the labels are soft.
        is_mixed: whether hard labels, which may fit too, would mostly be classes that the model thinks unlikely.
        is_weighted: whether the weighted form fits.
        every_row: whether it gives every row a label.
        differs: whether then s is another than that of hard labels.
        is_softmax: whether the logits are probabilities.
    """

    total: Any
    says: Any
    smoothing: Any
    mixed_smoothing: Any
    is_mixed: Any
    is_weighted: Any
    every_row: Any
    differs: Any
    is_softmax: Any


def examine(gradient: Gradient) -> Tensor:
    """Look for the form of one gradient: an :class:`Evidence` as a vector, so that one synchronization reads all."""
    z, g, all_live, _, tolerance = gradient
    num_classes = z.shape[1]
    p = _probabilities(z)
    # Only rows in which a third class has a share tell the forms apart; two classes have to differ among the rows.
    top = p.topk(min(2, num_classes - 1), 1).values.sum(1)
    live = all_live & (top < (CERTAIN if num_classes > 2 else CERTAIN_OF_TWO))
    says = live.any()
    if num_classes == 2:
        spread = torch.where(live, top, -1.0).amax() - torch.where(live, top, 2.0).amin()
        says = says & (spread > max(MIN_SPREAD, 5.0 * tolerance))
    # What tells class weights from none may be the rows that are certain.
    hard = read(Form("hard"), gradient)
    weighted = read(Form("weighted"), gradient)
    differs = ((hard.scale - weighted.scale).abs() > 5.0 * tolerance * weighted.scale) & (tolerance < HALF_TOLERANCE)
    unlikely = live & (p.gather(1, g.argmin(1, keepdim=True))[:, 0] < 0.1 * p.amax(1))
    num_told = live.sum()
    told = Gradient(z * live[:, None], g * live[:, None], live, num_told, tolerance)
    by_row = read(Form("weighted"), told)
    p = p * live[:, None]
    told_g = wide(told.g)
    evidence = Evidence(
        total=torch.linalg.vector_norm(g, ord=1, dtype=p.dtype),
        says=says,
        smoothing=_fit_smoothing(p, told_g, live, 1),
        mixed_smoothing=_fit_smoothing(p, told_g, live, min(2, num_classes)),
        is_mixed=unlikely.sum() > 0.5 * num_told,
        is_weighted=by_row.fits,
        every_row=((by_row.labels < num_classes) | ~live).all(),
        differs=differs,
        is_softmax=_are_probabilities(wide(z), tolerance),
    )
    return torch.stack([value.double() for value in evidence])


def _are_probabilities(z: Tensor, tolerance: float) -> Tensor:
    """Whether all rows are distributions, as a softmax layer gives them."""
    allowed = 0.02 if tolerance == HALF_TOLERANCE else 1e-4
    return (z.amin() > 0) & ((z.sum(1) - 1).abs().amax() <= allowed)


def _fit_smoothing(p: Tensor, g: Tensor, live: Tensor, labels: int) -> Tensor:
    """The label smoothing of rows with this many labels each; 0 if a line without a floor fits as well."""
    # A label that is too certain for a smoothed target has the highest entry of g. The line through the entries between
    # the highest and the lowest ones is then the better guess.
    lowest = g.topk(labels, 1, largest=False).indices
    highest = g.argmax(1, keepdim=True)
    between = live[:, None].to(p.dtype).expand_as(p).scatter(1, lowest, 0.0).scatter(1, highest, 0.0)
    slope = torch.maximum(_line(p, g, between, None)[0], _steepest(p, g))
    others, line = _others(p, g, live, None, labels, slope)
    smoothing = line[1] * p.shape[1]
    without = _rest_of_line(p, g, others, _line(p, g, others, 0.0))
    needed = without > 2.0 * _rest_of_line(p, g, others, line) + 1e-5 * torch.linalg.vector_norm(g)
    found = needed & (smoothing > MIN_SMOOTHING) & (smoothing < MAX_SMOOTHING)
    return torch.where(found, smoothing, 0.0)


def candidates(evidence: Evidence, num_classes: int, former: Form | None) -> list[tuple[int, Form]]:
    """The forms that may apply, each with its rank in the order in which they are tried.

    Of the forms that fit the simplest is taken, but a script that mixed labels before goes on with soft labels, which
    contain hard ones. A fitted model with mixed labels looks like one that is sure of the wrong class: soft labels hold
    both.
    """
    if not evidence.says or num_classes < 2:
        return []
    soft = Form("soft", evidence.mixed_smoothing)
    may_be_soft = num_classes >= MIN_CLASSES_OF_SOFT
    was_soft = former is not None and former.kind == "soft"
    takes_every_row = evidence.is_weighted and evidence.every_row
    forms = (
        (may_be_soft and (evidence.is_mixed or was_soft), soft),
        (evidence.smoothing, Form("hard", evidence.smoothing)),
        (takes_every_row and evidence.differs, Form("weighted")),
        (True, Form("hard")),
        (takes_every_row, Form("weighted")),
        (may_be_soft, soft),
        (evidence.is_weighted, Form("weighted")),
        (True, Form("log")),
    )
    return [(rank, form) for rank, (applies, form) in enumerate(forms) if applies]
