r"""What a softmax cross-entropy's gradient tells: the label of each row, the class dimension, the loss's factor.

For a row with probabilities p and label y the gradient of the logits is :math:`g = a\,(p - e_y)`, whose one negative
entry is the label; a is the row's own (class weights, focal losses, averages over sequences) or one for all rows. Then
the loss was multiplied by :math:`s = a\,N` before backward, N being the number of rows that it is the mean of. Three
forms are read, each row against the line that its gradient has to lie on:

1. hard labels, :math:`g = a\,(p - e_y)`;
2. label smoothing with one a, :math:`g = a\,(p - \epsilon/K) - a\,(1-\epsilon)\,e_y`;
3. ``NLLLoss`` on log-probabilities, :math:`g = -a\,e_y`, where the model's last layer is ``log_softmax``.

A row whose gradient is zero throughout is one that the loss ignores. A row on no line (mixed labels, a binary
cross-entropy, a regression, a sum of several losses) has no label.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcl_optim.distances import to_rows
from dcl_optim.forecaster import Scale

TINY = 1e-30
TOLERANCE = 1e-4  # share of a gradient's square left unexplained; bfloat16 rounding leaves about 1e-5
AT_TARGET = 2 * TOLERANCE**0.5  # the same for a target's gradient itself
OF_UNSURE = 2.5e-3  # the same for rows without a p above 1/2: smoothing and rounding leave the lowest entry the label
SURE = 1 - 1e-5  # of a larger probability the rounding of p - 1 says nothing
LEAST_SMOOTHING = 1e-3
LEAST_READ = 0.75  # of the rows that the loss does not ignore: fewer, and it is another loss
UNLIKELY = 0.2  # of two classes, a label of a smaller probability may be the other one's, overconfident and smoothed


class Reading(NamedTuple):
    """What a gradient told; plain values on the CPU, tensors elsewhere, so that nothing synchronises.

    Attributes:
        scale: s, what the loss was multiplied by; 1 where it cannot be read.
        has_scale: whether it could be read.
        labels: the label of each row (N,), K for a row without one.
        readable: whether this is the gradient of one of the three forms.
        all_labelled: whether each row is known to have a label, without synchronising a device.

    Examples:
        >>> z = torch.tensor([[0.0, 2.0], [1.0, 0.5], [3.0, 0.0]], requires_grad=True)
        >>> loss = torch.nn.functional.cross_entropy(z, torch.tensor([1, -100, 0]))  # the second row is ignored
        >>> reading = read_cross_entropy(z.detach(), torch.autograd.grad(loss, z)[0])
        >>> reading.labels, reading.readable, reading.all_labelled
        (tensor([1, 2, 0]), True, False)
    """

    scale: Scale
    has_scale: bool | Tensor
    labels: Tensor
    readable: bool | Tensor
    all_labelled: bool


def read_cross_entropy(z: Tensor, gradient: Tensor) -> Reading:
    r"""Read labels and factor off the gradient that a loss sent to the logits.

    Labels are exact for hard and smoothed labels, with ignored rows, class weights, a focal factor, reduction mean or
    sum, at every dtype. The factor is exact up to rounding where it is one for all rows: reduction mean (then s is the
    factor) or sum (then N times the factor). A smoothing of :math:`\epsilon` cannot be told from a factor
    :math:`1-\epsilon` while all predictions are still uniform. Of two classes, where every row lies on some line, a has
    to fall as the label's probability rises, as it does for class weights and focal losses.

    Args:
        z: logits, rows (N, K).
        gradient: the loss's gradient with respect to z, same shape.

    Examples:
        >>> z = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.5, 1.0]], requires_grad=True)
        >>> loss = 8.0 * torch.nn.functional.cross_entropy(z, torch.tensor([0, 2]))
        >>> reading = read_cross_entropy(z.detach(), torch.autograd.grad(loss, z)[0])
        >>> round(reading.scale, 4), reading.labels
        (8.0, tensor([0, 2]))
    """
    rows, classes = z.shape
    if not rows or classes < 2:
        return Reading(1.0, False, z.new_full((rows,), classes, dtype=torch.int64), not rows, False)
    g = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    p = torch.softmax(z.to(g.dtype), dim=1)
    least, labels = g.min(1)
    alike = _read_alike(p, g, least, labels, gradient.dtype) if g.device.type == "cpu" else None
    if alike is not None:
        return alike
    reading = _read_rows(z, p, g, least, labels, gradient.dtype)
    if gradient.dtype.itemsize > 2 or reading.all_labelled:
        return reading
    # A loss in half precision itself rounds its log-probabilities, which moves those of many classes by per cents.
    p = torch.log_softmax(z.to(gradient.dtype), dim=1).to(g.dtype).exp()
    rounded = _read_rows(z, p, g, least, labels, gradient.dtype, rounding=torch.finfo(gradient.dtype).eps / 2)
    (more,) = _numbers((rounded.labels < classes).sum() > (reading.labels < classes).sum())
    fields = (choose(more, theirs, ours) for ours, theirs in zip(reading, rounded, strict=True))
    return Reading(*fields)._replace(all_labelled=rounded.all_labelled)  # off the CPU no tensor


def may_be_read(z: Tensor, gradient: Tensor) -> bool:
    """Whether a gradient says anything at all: it is finite, and not only rounding, as where all rows are sure.

    Reads the device.
    """
    if not bool(gradient.isfinite().all() & (gradient != 0).any()):
        return False
    return z.shape[1] < 2 or bool((torch.softmax(z.float(), 1).amax(1) <= SURE).any())


def find_class_dim(z: Tensor, gradient: Tensor) -> int | None:
    """Find the dimension of the classes: the one along which the gradient is a cross-entropy's; None if there is none.

    Args:
        z: logits of any shape, the batch first.
        gradient: the loss's gradient with respect to z.

    Examples:
        >>> z = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()  # (batch, time, K)
        >>> loss = torch.nn.functional.cross_entropy(z.flatten(0, 1), torch.zeros(10, dtype=torch.int64))
        >>> find_class_dim(z.detach(), torch.autograd.grad(loss, z)[0])
        2
    """
    best, found = (False, 0), None
    for dim in range(1, z.ndim):
        if z.shape[dim] > 1:
            reading = read_cross_entropy(to_rows(z, dim), to_rows(gradient, dim))
            told = bool(reading.has_scale), int((reading.labels < z.shape[dim]).sum()) * z.shape[dim]
            if bool(reading.readable) and told > best:
                best, found = told, dim
    return found


def _read_alike(p: Tensor, g: Tensor, least: Tensor, lowest: Tensor, dtype: torch.dtype) -> Reading | None:
    """Hard labels with one slope in all rows, as most losses have them; None for any other. Reads the device."""
    negative, has_label, classes = g < 0, least < 0, p.shape[1]
    number = int(torch.count_nonzero(has_label))
    if not number and not bool(g.any()):  # all ignored, or of a compiled loss, which says nothing of any form
        return Reading(1.0, False, torch.full_like(lowest, classes), True, False)
    if number * (classes - 1) <= 1 or int(torch.count_nonzero(negative)) != number:  # one in each row that has a label
        return None
    p, others = p.masked_fill(negative, 0.0), g.clamp(min=0.0)
    if number < len(p):
        if dtype == torch.float16 or bool(g[~has_label].any()):  # or the row is not sure to be an ignored one
            return None
        p, others, least = p[has_label], others[has_label], least[has_label]
        lowest = lowest.masked_fill(~has_label, classes)
    slope, fits = _common_line(p, others, least, TOLERANCE if dtype.itemsize == 2 else 3e-6)
    return Reading(slope * number, True, lowest, True, len(p) == len(g)) if fits else None


def _common_line(p: Tensor, g: Tensor, at_target: Tensor, tolerance: float) -> tuple[float, bool]:
    """The slope a that all rows share, and whether they do: away from the targets g = a p, there g = a (p - 1).

    Each operation that can be left out is felt in a small step. ``p`` and ``g`` are 0 at the targets.
    """
    sums = torch.stack((p.flatten(), g.flatten()))
    (pp, pg), (_, gg) = (sums @ sums.T).tolist()
    slope = pg / (pp + TINY)
    rest = torch.add(sums[1], sums[0], alpha=-slope)  # a difference of the sums would be all rounding in a large batch
    if slope <= 0 or float(rest.dot(rest)) > tolerance * gg:
        return slope, False
    short = p.sum(1)  # 1 - p at the target, without the rounding of a difference
    low, high = (float(short.min()), float(short.max())) if p.shape[1] == 2 else (0.0, float(short.max()))
    # As in _at_target, of numbers below zero.
    excess = torch.add(at_target, short, alpha=slope).abs_().add_(at_target, alpha=AT_TARGET)
    fits = float(excess.max()) <= 1e-6 * slope and high > 1 - SURE
    return slope, fits and (p.shape[1] > 2 or bool(_is_of_labels(low, high)))


def _at_target(slope: Any, short: Tensor, g: Tensor) -> Tensor:
    """Whether the targets' gradients are a (p - 1), so that each row sums to zero."""
    return (g + slope * short).abs() <= AT_TARGET * g.abs() + 1e-6 * slope


def _is_of_labels(low: Any, high: Any) -> Any:
    """Whether one slope of all rows of two classes shows that the labels are hard, by the range of 1 - p.

    Two classes have a slope in each row. Smoothed labels of overconfident predictions look like the other class's, with
    another slope for each p.
    """
    return (high < 1 - UNLIKELY) | (high - low > 0.01)


def _read_rows(
    z: Tensor, p: Tensor, g: Tensor, least: Tensor, lowest: Tensor, dtype: torch.dtype, rounding: float = 0.0
) -> Reading:
    """As :func:`read_cross_entropy`, of any of the three forms, also with rows that are ignored or sure.

    ``rounding`` is that of p before 1 was taken off it, where the loss was computed in half precision.
    """
    live = (g != 0).any(1)
    top_p, top = p.max(1)
    # In float16 the gradient of a sure row may vanish altogether; for the factor it counts, as the loss counts it.
    counted = live | (top_p > 1 - 1e-6) if dtype == torch.float16 else live
    *hard, unclear = _read_hard(p, g, lowest, live, counted, top, top_p, rounding)
    forms = [
        _read_smoothed(p, g, lowest, top, counted, torch.finfo(dtype).eps),
        tuple(hard),
        _read_log_probabilities(z, g, least, lowest, live),
    ]
    none = p.shape[1]
    scale, has_scale, labels = 1.0, False, torch.full_like(lowest, none)
    (rows,) = _numbers(counted.sum())
    for slope, has_slope, found, labelled in reversed(forms):
        usable = has_slope & (rows * (none - 1) > 1)
        scale, has_scale = choose(usable, slope * rows, scale), has_scale | usable
        labels = torch.where(labelled & live, found, labels)
    doubtful = (unclear & live & (labels == none)).sum()
    read, number, doubtful = _numbers(torch.stack(((labels < none).sum(), live.sum(), doubtful)))
    readable = read >= LEAST_READ * (number - doubtful)
    labels = torch.where(torch.as_tensor(readable, device=p.device), labels, none)
    return Reading(scale, has_scale, labels, readable, read == len(p) if p.device.type == "cpu" else False)


Form = tuple[Any, Any, Tensor, Tensor]  # the common slope, whether there is one, labels, and which rows have theirs


def _read_hard(
    p: Tensor, g: Tensor, lowest: Tensor, live: Tensor, counted: Tensor, top: Tensor, top_p: Tensor, rounding: float
) -> tuple[Any, Any, Tensor, Tensor, Tensor]:
    """As a ``Form``, and the rows that may be of one class or the other."""
    # A sure row, whose p is rounded to 1 at the label: its gradient there is rounded too, and need not be below zero.
    others = g.scatter(1, top[:, None], 0.0)
    sure = (top_p > SURE) & (g.gather(1, top[:, None])[:, 0] <= 0) & (others >= 0).all(1)
    labels = torch.where(sure, top, lowest)
    target = labels[:, None]
    at_target = g.gather(1, target)[:, 0]
    p, g = p.scatter(1, target, 0.0) * counted[:, None], g.scatter(1, target, 0.0)
    pp, pg, gg, short = (p * p).sum(1), (p * g).sum(1), (g * g).sum(1), p.sum(1)
    slopes = pg / (pp + TINY)
    tolerance = torch.where(top_p > 0.5, TOLERANCE, OF_UNSURE)
    on_line = (slopes > 0) & (gg - slopes * pg <= tolerance * gg)
    on_line &= (at_target + slopes * short).abs() <= 2 * tolerance.sqrt() * at_target.abs() + rounding * slopes
    slope = pg.sum() / (pp.sum() + TINY)
    fits = (slope > 0) & (gg.sum() - slope * pg.sum() <= TOLERANCE * gg.sum()) & (live & (short > 1 - SURE)).any()
    fits &= (_at_target(slope, short, at_target) | ~counted).all()
    unclear = torch.zeros_like(live)
    if p.shape[1] == 2:
        unclear = on_line & ~sure & (short > 1 - UNLIKELY)
        low, high = torch.where(live, short, 2.0).amin(), torch.where(live, short, -1.0).amax()
        fits &= _is_of_labels(low, high) & (live.sum() > 1)
        on_line &= fits | _of_two_classes(slopes, short, labels, live & on_line & ~sure)
    slope, fits = _numbers(torch.stack((slope, fits.to(slope.dtype))))
    return slope, fits > 0, labels, on_line | sure, unclear


def _of_two_classes(slopes: Tensor, short: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Which rows of two classes have their labels.

    As each row has its slope, mixed labels lie on lines too. But the slopes of class weights are one for each label,
    and those of focal losses fall as the label's probability rises (from 0.7 of the highest, at a probability of 0).
    """
    falls, told = torch.ones_like(rows[:1]), torch.zeros_like(rows)
    for label in (0, 1):
        asked = rows & (labels == label)
        order = torch.where(asked, short, 2.0).argsort()
        ordered, in_order = slopes[order], asked[order]
        highest = torch.where(in_order, ordered, 0.0).cummax(0).values
        falls = falls & (~in_order | (ordered >= 0.7 * highest)).all()
        low, high = torch.where(asked, short, 2.0).amin(), torch.where(asked, short, -1.0).amax()
        is_one = (torch.where(asked, slopes, torch.inf).amin() >= 0.99 * highest[-1]) & (high - low > 0.01)
        told = told | (asked & (is_one | (short <= 1 - UNLIKELY)))
    return told & falls


def _read_smoothed(p: Tensor, g: Tensor, lowest: Tensor, top: Tensor, counted: Tensor, eps: float) -> Form:
    # An overconfident target's gradient is no longer the lowest, but the target then has the largest p. So both are
    # left out of the line of the others; a target that is both lies on a line of its own, of the same slope.
    classes, either = p.shape[1], torch.stack((lowest, top), 1)
    others = counted[:, None].expand_as(p).scatter(1, either, False)
    certain = counted & (lowest == top)
    pp, pg, gg, mean_p, mean_g = _centred(p, g, others)
    at_top = top[:, None]
    targets = _centred(p.gather(1, at_top), g.gather(1, at_top), certain[:, None])
    pp, pg, gg = pp + targets[0], pg + targets[1], gg + targets[2]
    number = others.sum()
    slope = pg / (pp + TINY)
    # Nearly uniform predictions say nothing: there other losses are straight lines in p too, of other slopes.
    fits = (slope > 0) & (number > 2) & (pp > 1e-3 * number * mean_p * mean_p)
    # What they share is rounded, too, which in bfloat16 is more than a small share of how they differ.
    rounding = number * (eps * mean_g).square()
    fits &= (gg > 16 * rounding) & (gg - slope * pg <= TOLERANCE * gg + rounding / 4)
    shift = mean_g - slope * mean_p
    fits &= (-classes * shift > LEAST_SMOOTHING * slope) & (-classes * shift < slope)
    residual = g - slope * p - shift
    depth, labels = residual.min(1)
    depths = torch.where(counted, depth, 0.0).sum() / (counted.sum() + TINY)
    # Every row sums to zero: the shifts of all classes, and the target's depth, make up for the slope.
    fits &= (slope + classes * shift + depths).abs() <= 0.02 * slope
    rest = residual.scatter(1, labels[:, None], 0.0).square().sum(1)
    labelled = fits & (rest <= TOLERANCE * depth * depth) & ((depth - depths).abs() <= 0.02 * depths.abs())
    slope, found = _numbers(torch.stack((slope, (fits & (labelled | ~counted).all()).to(slope.dtype))))
    return slope, found > 0, labels, labelled


def _centred(p: Tensor, g: Tensor, points: Tensor) -> tuple[Tensor, ...]:
    """Sums of squares about the means, and the means, over some points."""
    number = points.sum() + TINY
    mean_p, mean_g = torch.where(points, p, 0.0).sum() / number, torch.where(points, g, 0.0).sum() / number
    p, g = torch.where(points, p - mean_p, 0.0), torch.where(points, g - mean_g, 0.0)
    return (p * p).sum(), (p * g).sum(), (g * g).sum(), mean_p, mean_g


def _read_log_probabilities(z: Tensor, g: Tensor, least: Tensor, lowest: Tensor, live: Tensor) -> Form:
    normalised = torch.logsumexp(z.to(g.dtype), 1).abs() <= 0.05  # which leaves room for bfloat16
    labelled = ((g != 0).sum(1) == 1) & (least < 0) & normalised
    lengths = torch.where(live, -least, 0.0)
    mean = lengths.sum() / (live.sum() + TINY)
    is_one = (mean > 0) & (((lengths - mean).abs() <= 0.01 * mean) | ~live)
    slope, found = _numbers(torch.stack((mean, (is_one & (labelled | ~live)).all().to(mean.dtype))))
    return slope, found > 0, lowest, labelled


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """One of two values, by a plain condition or by a tensor that is on its device."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def _numbers(matrix: Tensor) -> list[Any]:
    """Plain numbers on the CPU, where they are much cheaper to go on with; tensors elsewhere."""
    flat = matrix.flatten()
    return flat.tolist() if flat.device.type == "cpu" else list(flat.unbind())
