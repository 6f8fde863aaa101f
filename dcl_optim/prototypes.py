"""Class prototypes: one vector of logits per class in place of a second network."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dcl_optim import _sync
from dcl_optim._torch import constant
from dcl_optim._validation import check_state
from dcl_optim.distances import Distance
from dcl_optim.distributed import DataParallelGroup
from dcl_optim.forecaster import Forecaster, Labels
from dcl_optim.layout import difference, sum_to_one, to_rows, wide
from dcl_optim.progress import Forward
from dcl_optim.pull import Pull, Scale, pull_of

UPDATES = ("rows", "batch")
TINY = 1e-30  # labeled rows before the first step, so that the accuracy is 0 then
MAX_BYTES = 2**30  # of the (K, K) prototypes
NEVER = -1e30  # rows; not infinite, which alpha = 0 would make nan
MASKED = -1e4  # a logit at or below is that of a masked class
UNSEEN = -math.inf  # an entry of a prototype that no row has shown: a difference from it counts for nothing
DECAY = 0.98  # of the running mean of the training accuracy, a step
FEWEST_ROWS = 8  # fewer lie in the order of their labels, or sum to 1, by chance
SHARE_TOLERANCE = 0.02  # of a share and of a row's sum; bfloat16 leaves up to 0.004 of a smoothed label's sum
RESHAPING = ("ToCopy", "View", "UnsafeView", "Unsqueeze", "Squeeze", "Transpose", "Permute", "Slice", "IndexBackward")
IN_BATCH = (
    "the labels of this batch are its rows' places, 0, 1, 2, ... up to its last logit: scores against the rows of a "
    "batch (in-batch negatives, CLIP) have no classes.\n"
    "  Fix: use DCLOptimizer (no gain was measured for such losses). If these are classes, pass num_classes={}"
)

KINDS = (
    "pass class indices in an integer dtype, (N,) or (N, d1, ...), or soft or one-hot labels in floating point, "
    "labels.float(), in the shape of the logits, (N, K) or (N, K, d1, ...)"
)
PROBABILITIES = (
    "logits has rows that are probabilities, whose distances are so small that the penalty has hardly any effect.\n"
    "  Fix: pass the logits themselves, before softmax or sigmoid, or their log_softmax. See docs/troubleshooting.md"
)
OTHER_NUM_CLASSES = (
    "num_classes={0} but there are {1} logits a row, in logits of shape {2}; pass num_classes={1}, or logits with the "
    "classes in dimension 1"
)
OTHER_WIDTH = (
    "the first batch, or the loaded state, had {} logits a row, this one has {}, in logits of shape {}; build the base "
    "optimizer and wrap it again after a change of the classes. For two heads add the penalty of one. Scores against "
    "the rows of a batch (in-batch negatives) have no classes"
)


class Prototypes(Forecaster):
    r"""The prototypes :math:`p^k` of Deep Companion Prototype (the paper's appendix, Equations 5 and 6).

    Prediction: the prototype of each row's class; with soft labels the mixture :math:`\sum_k t_{ik}\,p^k`, and rows
    weigh :math:`t_{ik}` in the mean of class k. The penalty is :math:`\frac1n\sum_i w_i\,\delta(z_i, p^{y_i})` over the
    n rows with a label; :math:`w_i = \min(1, n_{y_i})`, which is 0 for a class that no step has seen. With soft labels
    it is 1 once all classes of the row were seen: each has a share of many rows, so that a small n is not an old one.

    A step that learns from no row, since its batch could not be read, is not finite or has no label, ages all
    prototypes: :math:`n_k \leftarrow \alpha\,n_k`.

    A logit that is not finite, or at most -10,000, is masked: it neither pulls nor is learned from. An entry of a
    prototype that no row has shown yet does not pull, and its first mean is taken whole. Both cost something from the
    first masked logit on that is found.

    The tables have a row K for the rows without a label, which counts as a class that no step has seen.

    Args:
        num_classes: K, or None for that of the first logits.
        update: ``"rows"`` for a mean of rows, ``"batch"`` for one in which each batch counts alike (Equation 6).
        distance: a function (z, c) of rows (N, K) that returns one value a row.
        like: a tensor whose device, and dtype at float32 or wider, the prototypes take.
        group: the ranks that train the model together.

    Examples:
        >>> from dcl_optim.distances import mse
        >>> group = DataParallelGroup(torch.nn.Linear(4, 3), process_group=None)
        >>> Prototypes(3, "rows", mse, torch.zeros(()), group).values.shape
        torch.Size([3, 3])
    """

    reads_labels = True
    predicts = False
    # Since the last step:
    _pending: list[tuple[Tensor, Tensor]]  # classes, and differences z - p, of rows
    _num_pending: int  # rows
    _sums: Tensor | None  # of further differences, by class, (K + 1, K)
    _counts: Tensor | None  # the rows of each class, (K + 1,)
    _shown: Tensor | None  # the rows that show each entry, (K + 1, K), once masks were found
    _num_right: Tensor | None  # rows that were predicted right

    def __init__(
        self,
        num_classes: int | None,
        update: str,
        distance: Distance,
        like: Tensor,
        group: DataParallelGroup,
    ) -> None:
        self._given = num_classes
        self._counts_rows = update == "rows"
        self.distance = distance
        self._group = group
        self._measures_from = math.inf  # with more classes the accuracy is measured
        self._may_be_in_batch = num_classes is None  # until labels were seen
        self.may_be_probabilities = True  # until the term got logits
        self._num_like_probabilities = 0  # rows that it has looked at
        self._step_number = 0
        self._create(num_classes or 0, like)
        self.forget()

    def _create(self, num_classes: int, like: Tensor) -> None:
        """Create the prototypes of this many classes; 0 as long as the number is not known."""
        dtype = torch.promote_types(like.dtype, torch.float32) if like.is_floating_point() else torch.float32
        size = num_classes**2 * dtype.itemsize
        if size > MAX_BYTES:
            raise ValueError(
                f"num_classes={num_classes}: the prototypes would need {size / 2**30:.1f} GiB (limit 1 GiB, 16,384 "
                "classes).\n  Fix: use DCLOptimizer, which keeps none (no gain was measured at this size)"
            )
        self._rows = torch.zeros(num_classes + 1, num_classes, dtype=dtype, device=like.device)
        self._numbers = self._rows.new_zeros(num_classes + 1)  # n_k
        self._one = self._rows.new_ones(())
        self._no_rows = torch.zeros_like(self._numbers)  # of each class in an empty batch
        self._no_rows[num_classes:] = NEVER  # so that no step gives row K a number above 0
        self._has_masks = False
        self._fit = self._rows.new_tensor([0.0, TINY])  # decayed numbers of rows predicted right, and with a label
        self.num_classes = num_classes

    @property
    def seen(self) -> Tensor:
        """Which classes have a prototype, (K,) bool."""
        return self._numbers[:-1] > 0

    @property
    def values(self) -> Tensor:
        """A copy of all prototypes, (K, K); zero where no row has shown a value, (0, 0) before K is known."""
        return self._known()[:-1].clone()

    def _known(self) -> Tensor:
        """The rows, zero where no row has shown a value."""
        return self._rows.masked_fill(self._rows == UNSEEN, 0.0) if self._has_masks else self._rows

    def measure_accuracy(self, from_classes: float) -> None:
        self._measures_from = from_classes

    def train_accuracy(self) -> Tensor:
        return self._fit[0] / self._fit[1]

    def figures(self) -> dict[str, Any]:
        """Mean norm, and root mean square margin: the logit of the own class less the mean of the others."""
        rows = self.values
        number = self.seen.sum()
        own = rows.diagonal()
        margins = own - (rows.sum(1) - own) / max(len(rows) - 1, 1)  # 0 for classes not seen
        figures = {
            "prototype_norm": rows.norm(dim=1).sum() / number,
            "prototype_margin": (margins.square().sum() / number).sqrt(),
        }
        if self._measures_from < math.inf:
            is_measured = self.num_classes > self._measures_from
            figures["train_accuracy"] = self.train_accuracy() if is_measured else math.nan
        return figures

    def settings(self) -> dict[str, Any]:
        return {"num_classes": self.num_classes or "not known yet"}

    # ---- the penalty: 1/n Σ_i w_i δ(z_i, p^{y_i}) --------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], step_number: int) -> None:
        self._group.find()
        self._step_number = step_number

    def pull(self, forward: Forward, labels: Labels | None) -> Pull:
        assert labels is not None
        self._prepare(forward)
        if self._may_be_in_batch:
            self._refuse_in_batch(forward, labels)
        if labels.rows.ndim == 1:
            c = self._rows.index_select(0, labels.rows)
            weights = self._numbers.index_select(0, labels.rows).clamp_(0.0, 1.0)
        else:
            c, weights = self._of_shares(labels.rows)
        number = labels.number
        number = number.clamp(min=1) if isinstance(number, Tensor) else max(number, 1)
        return pull_of(self.distance, forward.rows, c, weights / number)

    def _of_shares(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture of prototypes of each row, and 1 if all its classes were seen, else 0."""
        shares = shares.to(self._rows)
        with torch.autocast(shares.device.type, enabled=False):
            c = shares @ self._known()[:-1]
            if self._has_masks:
                is_unseen = shares @ (self._rows[:-1] == UNSEEN).to(shares) > 0
                c = c.masked_fill_(is_unseen, UNSEEN)
        is_unknown = ((shares > 0) & ~self.seen).any(1)
        return c, ((shares.sum(1) > 0.5) & ~is_unknown).to(shares)

    def _prepare(self, forward: Forward) -> None:
        """Follow the logits to their number, device and dtype."""
        rows = forward.rows
        if not self.num_classes:
            self._create(rows.shape[1], rows)
        if rows.shape[1] != self.num_classes:
            message = OTHER_WIDTH if self._given is None else OTHER_NUM_CLASSES
            raise ValueError(message.format(self.num_classes, rows.shape[1], tuple(forward.shape)))
        dtype = torch.promote_types(self._rows.dtype, rows.dtype)
        if self._rows.device != rows.device or self._rows.dtype != dtype:
            self._convert(rows.device, dtype)
        if not self._has_masks and forward.may_read and bool((rows <= MASKED).any()):
            self._begin_masks()
        if self._has_masks:
            torch.threshold_(rows, MASKED, -math.inf)

    def _begin_masks(self) -> None:
        """From now on learn each entry of a prototype from the rows that show it."""
        self._has_masks = True
        is_unseen = (self._numbers <= 0)[:, None] | (self._rows <= MASKED)  # of masks that were found late
        self._rows.masked_fill_(is_unseen, UNSEEN)

    def _refuse_in_batch(self, forward: Forward, labels: Labels) -> None:
        """Raise ValueError if the labels are the rows' places, as of in-batch negatives, when they are first seen."""
        number = len(labels.rows)
        if not forward.may_read:
            return
        self._may_be_in_batch = False
        if number != self.num_classes or number < FEWEST_ROWS:
            return
        classes = self._classes_of(labels.rows)
        is_in_place = classes == torch.arange(number, device=classes.device)
        if bool((is_in_place | (classes == number)).all() & (2 * is_in_place.sum() > number)):
            raise ValueError(IN_BATCH.format(number))

    def check_logits(self, logits: Tensor, may_read: bool) -> None:
        """Raise ValueError for probabilities: a sigmoid's, or if all the first rows that the term got sum to 1."""
        if _is_of_sigmoid(logits.grad_fn):
            raise ValueError(PROBABILITIES)
        if not may_read or not logits.numel():
            return
        self.may_be_probabilities = _are_probabilities(logits.detach())
        self._num_like_probabilities += logits.numel() // logits.shape[1]
        if self.may_be_probabilities and self._num_like_probabilities >= FEWEST_ROWS:
            raise ValueError(PROBABILITIES)

    def _classes_of(self, labels: Tensor) -> Tensor:
        """The class of each row (N,), K for none; of soft labels that of the largest share."""
        if labels.ndim == 1:
            return labels
        return torch.where(labels.sum(1) > 0.5, labels.argmax(1), self.num_classes)

    # ---- learning: p^k ← p^k + 1/n_k Σ (z_i - p^k) -------------------------------------------------------------------

    def observe(self, forward: Forward, pull: Pull, labels: Labels | None, scale: Scale, alpha: float) -> None:
        assert labels is not None
        if labels.rows.ndim == 1:
            self._add_rows(forward.rows, labels.rows, pull)
        else:
            self._add_shares(forward.rows, labels.rows.to(self._rows))
        if self._num_pending > self.num_classes or self._group.size > 1:
            self._sum_by_class()  # which takes less memory than the rows
        if self.num_classes > self._measures_from:
            num_right = (forward.rows.argmax(1) == self._classes_of(labels.rows)).sum(dtype=self._fit.dtype)
            self._num_right = num_right if self._num_right is None else self._num_right + num_right

    def _add_rows(self, z: Tensor, classes: Tensor, pull: Pull) -> None:
        if self._has_masks:
            self._shown_of_step().index_add_(0, classes, torch.isfinite(z).to(self._rows))
        is_difference = pull.norms is not None and not self._has_masks  # from 0 where no row has shown a value
        apart = pull.slope if is_difference else difference(z, self._known().index_select(0, classes))
        self._counts_of_step().index_add_(0, classes, self._one.expand(len(classes)))
        self._pending.append((classes, apart))
        self._num_pending += len(classes)

    def _add_shares(self, z: Tensor, shares: Tensor) -> None:
        """A row counts for each class by its share. A class that is masked in a row (minus infinity) moves nothing."""
        known = torch.isfinite(z)
        z = z.to(shares.dtype).masked_fill(~known, 0.0)
        with torch.autocast(z.device.type, enabled=False):
            numbers_known = shares.T @ known.to(shares)
            self._sum_by_class()[:-1] += shares.T @ z - numbers_known * self._known()[:-1]
        if self._has_masks:
            self._shown_of_step()[:-1] += numbers_known
        self._counts_of_step()[:-1] += shares.sum(0)

    def skip(self, forward: Forward) -> None:
        if self._group.size > 1 and not self.num_classes:  # the others wait for this one's sums
            if len(forward.shape) > 2:
                raise RuntimeError(
                    "the first batch of this rank shows no labels, so the number of classes is not known here.\n"
                    "  Fix: pass num_classes="
                )
            self._prepare(forward)
        if self.num_classes:
            self._counts_of_step()

    def _counts_of_step(self) -> Tensor:
        """The rows of each class since the last step, (K + 1,)."""
        if self._counts is None:
            self._counts = self._no_rows.clone()
        return self._counts

    def _shown_of_step(self) -> Tensor:
        """The rows that show each entry since the last step, (K + 1, K): all those of before masks were found."""
        if self._shown is None:
            self._shown = self._counts_of_step()[:, None].expand_as(self._rows).clone()
        return self._shown

    def _sum_by_class(self) -> Tensor:
        """Add the pending differences up by class, (K + 1, K)."""
        if self._sums is None:
            self._sums = torch.zeros_like(self._rows)
        for classes, apart in self._pending:
            self._sums.index_add_(0, classes, apart)
        self._pending = []
        return self._sums

    def learn(self, alpha: float) -> None:
        if self._group.size > 1 and self.num_classes:  # also without a batch: the other ranks wait
            self._reduce()
        counts = self._counts
        if counts is None:
            return
        if self._num_right is not None:
            fit = torch.stack((self._num_right, counts[:-1].sum()))
            self._fit = torch.add(fit, self._fit, alpha=DECAY)
        divisors = self._divisors(counts, alpha)[:, None]
        if self._has_masks:
            divisors = self._begin_entries(divisors)
        if self._sums is not None:
            self._rows.addcdiv_(self._sums, divisors)
        for classes, apart in self._pending:
            self._rows.index_add_(0, classes, apart.div_(divisors.index_select(0, classes)))
        self.forget()

    def _begin_entries(self, divisors: Tensor) -> Tensor:
        """Prepare entries that are shown for the first time; return what each entry's sum is divided by, (K + 1, K)."""
        shown = self._shown_of_step()
        is_first = (self._rows == UNSEEN) & (shown > 0)
        is_first[self.num_classes :] = False  # of rows without a label
        self._rows.masked_fill_(is_first, 0.0)
        return torch.where(is_first, shown, divisors)

    def _reduce(self) -> None:
        """Sum over the ranks, in two reductions, or three once one of them has found masks."""
        num_right = self._one.new_zeros(()) if self._num_right is None else self._num_right
        has_masks = self._one.new_full((), self._has_masks)
        counts = torch.cat((self._counts_of_step(), num_right[None], has_masks[None]))
        self._group.all_reduce_sum(counts)
        if not self._has_masks and _sync.may_sync(self._step_number, counts) and bool(counts[-1] > 0):
            self._begin_masks()
        if self._has_masks:
            self._group.all_reduce_sum(self._shown_of_step())
        self._group.all_reduce_sum(self._sum_by_class())
        self._counts = counts[:-2]
        if self.num_classes > self._measures_from:
            self._num_right = counts[-2]

    def _divisors(self, counts: Tensor, alpha: float) -> Tensor:
        """Add the counts to the numbers; return what the sum of each class's differences is divided by, (K + 1,)."""
        is_here = counts > 0
        ages = is_here >= is_here.any()  # the classes that are here, or all if none is
        if self._counts_rows:
            numbers = torch.add(counts, self._numbers, alpha=alpha)
            divisors = numbers
        else:  # Equation 6, where the first mean becomes the prototype
            numbers = torch.maximum(alpha * self._numbers, is_here.to(counts))
            divisors = counts / (1.0 - alpha * self._numbers.clamp(0.0, 1.0))
        self._numbers = torch.where(ages, numbers, self._numbers)
        return torch.where(is_here, divisors, constant(math.inf, counts.device))

    def forget(self) -> None:
        self._pending = []
        self._num_pending = 0
        self._sums = None
        self._counts = None
        self._shown = None
        self._num_right = None

    def _convert(self, device: torch.device, dtype: torch.dtype) -> None:
        """Follow the model to another device, and to a wider dtype."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device, dtype))
        self._pending = [(classes.to(device), apart.to(device, dtype)) for classes, apart in self._pending]

    # ---- the state ---------------------------------------------------------------------------------------------------

    def _saved(self) -> dict[str, Tensor]:
        """Views of what a resumed run has to know, by their names in the state."""
        return {"values": self._rows[:-1], "numbers": self._numbers[:-1], "fit": self._fit}

    def state_dict(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self._saved().items()}

    def check_state(self, state: dict[str, Any]) -> None:
        numbers = state.get("numbers") if isinstance(state, dict) else None
        number = len(numbers) if isinstance(numbers, Tensor) and numbers.ndim else 0
        if self._given is not None or number:
            number = self._given or self.num_classes or number
        expected = {
            "values": torch.empty(number, number, device="meta"),
            "numbers": torch.empty(number, device="meta"),
            "fit": torch.empty(2, device="meta"),
        }
        check_state(state, expected, "prototypes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forget()
        values = state["values"]
        self._create(len(values), values.to(self._rows.device))  # in the dtype of the logits that it was learned from
        for name, tensor in self._saved().items():
            tensor.copy_(state[name])
        if _sync.may_sync(1, values) and bool((values == UNSEEN).any()):
            self._has_masks = True
            self._rows[-1] = UNSEEN
        self._may_be_in_batch = self._given is None and not len(values)


def labels_of(labels: Any, logits: Tensor, may_read: bool, ignore_index: int) -> Labels:
    """Check labels that the penalty term got, and lay them out as rows: class indices, or soft labels.

    Values are checked where they may be read.
    """
    shape = tuple(logits.shape)
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}; pass torch.as_tensor(labels)")
    if logits.ndim < 2 or logits.shape[1] == 1:
        raise ValueError(
            f"logits of shape {shape} have no classes; pass (N, K) or (N, K, d1, ...) with K of at least 2, or use "
            "DCLOptimizer (no gain was measured)"
        )
    if labels.dtype == torch.bool or labels.is_complex():
        raise TypeError(f"labels has {labels.dtype}; of two classes pass labels.long(), else {KINDS}")
    is_soft = labels.is_floating_point()
    if labels.shape != (shape if is_soft else (*shape[:1], *shape[2:])):
        raise ValueError(
            f"labels of dtype {labels.dtype} and shape {tuple(labels.shape)} do not fit logits of shape {shape}; "
            f"{KINDS}. For (batch, time, classes) pass logits.flatten(0, 1), labels.flatten()"
        )
    # The script may write to its own labels before the step, so both are copied.
    if is_soft:
        shares = wide(to_rows(labels.detach())).clone()
        if may_read and len(shares):
            _check_shares(shares)
        return Labels(shares, len(shares))
    classes = labels.detach().flatten().long()
    has_label = classes != ignore_index
    if may_read:
        wrong = classes[has_label & ((classes < 0) | (classes >= shape[1]))]
        if len(wrong):
            raise ValueError(
                f"labels has {int(wrong[0])}; labels must lie in 0..{shape[1] - 1} or equal ignore_index={ignore_index}"
            )
    classes = classes.where(has_label, constant(shape[1], classes.device))
    return Labels(classes, has_label.sum(dtype=torch.float32))


def _is_of_sigmoid(node: Any) -> bool:
    """Whether an autograd node is a sigmoid's, or gives its output in another shape or dtype."""
    while node is not None and node.name().startswith(RESHAPING):
        node = node.next_functions[0][0]
    return node is not None and node.name() == "SigmoidBackward0"


def _are_probabilities(logits: Tensor) -> bool:
    return bool((logits.amin() >= 0) & sum_to_one(logits, is_half=logits.dtype.itemsize < 4))


def _check_shares(shares: Tensor) -> None:
    sums = shares.sum(1)
    least, lowest, highest = torch.stack((shares.min(), sums.min(), sums.max())).tolist()
    if not min(least, lowest - 1.0, 1.0 - highest) >= -SHARE_TOLERANCE:
        raise ValueError(
            f"labels has soft labels that are not distributions over {shares.shape[1]} classes (the least share is "
            f"{least:g}, rows sum to {lowest:g} up to {highest:g}).\n"
            "  Fix: with sigmoid outputs (binary, multi-label) and regression use DCLOptimizer (no gain was "
            "measured)"
        )
