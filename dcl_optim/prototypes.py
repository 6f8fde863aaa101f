"""Class prototypes: one vector of logits per class in place of a second network."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcl_optim import _sync
from dcl_optim._torch import outside_compiled_graphs
from dcl_optim._validation import check_state
from dcl_optim.distances import Distance
from dcl_optim.distributed import DataParallelGroup
from dcl_optim.forecaster import Forecaster, Labels
from dcl_optim.labels import FirstLook, classes_of
from dcl_optim.layout import difference
from dcl_optim.progress import Forward
from dcl_optim.pull import Pull, Scale, pull_of
from dcl_optim.tally import MASKED, NEVER, UNSEEN, State, Tally, begin_masks_, learn_, learn_fit_, new_state

UPDATES = ("rows", "batch")
MAX_BYTES = 2**30  # of the (K, K) prototypes
OTHER_NUM_CLASSES = (
    "num_classes={0} but there are {1} logits a row, in logits of shape {2}; pass num_classes={1}, or logits with the "
    "classes in dimension 1"
)
OTHER_WIDTH = (
    "the first batch, or the loaded state, had {} logits a row, this one has {}, in logits of shape {}; build the base "
    "optimizer and wrap it again after a change of the classes. For two heads add the penalty of one. Scores against "
    "the rows of a batch (in-batch negatives) have no classes"
)


class Lesson(NamedTuple):
    """What a batch shows, without its labels.

    Attributes:
        values: the differences z - p of rows with one class each; of rows with soft labels the logits z. (N, K).
        shows: whether each logit is a number, (N, K); None without masks.
        predicted: the predicted class of each row, (N,); None if the accuracy is not measured.
    """

    values: Tensor
    shows: Tensor | None
    predicted: Tensor | None


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

    def __init__(
        self,
        num_classes: int | None,
        update: str,
        distance: Distance,
        like: Tensor,
        group: DataParallelGroup,
    ) -> None:
        self.distance = distance
        self.first_look = FirstLook(num_classes)
        self._given = num_classes
        self._counts_rows = update == "rows"
        self._group = group
        self._measures_from = math.inf  # with more classes the accuracy is measured
        self._step_number = 0
        dtype = torch.promote_types(like.dtype, torch.float32) if like.is_floating_point() else torch.float32
        self._create(num_classes or 0, dtype, like.device)

    def _create(self, num_classes: int, dtype: torch.dtype, device: torch.device) -> None:
        """Create the prototypes of this many classes; 0 as long as the number is not known."""
        size = num_classes**2 * dtype.itemsize
        if size > MAX_BYTES:
            raise ValueError(
                f"num_classes={num_classes}: the prototypes would need {size / 2**30:.1f} GiB (limit 1 GiB, 16,384 "
                "classes).\n  Fix: use DCLOptimizer, which keeps none (no gain was measured at this size)"
            )
        self.num_classes = num_classes
        self._state = new_state(num_classes, dtype, device)
        self._tally: Tally | None = None
        self._has_masks = False
        self._one = self._state.numbers.new_ones(())
        self._no_rows = self._state.numbers.new_zeros(num_classes + 1)  # the counts of an empty batch
        self._no_rows[num_classes] = NEVER  # so that no step gives row K a number above 0

    @property
    def seen(self) -> Tensor:
        """Which classes have a prototype, (K,) bool."""
        return self._state.numbers[:-1] > 0

    @property
    def values(self) -> Tensor:
        """A copy of all prototypes, (K, K); zero where no row has shown a value, (0, 0) before K is known."""
        return self._state.known(self._has_masks)[:-1].clone()

    def measure_accuracy(self, from_classes: float) -> None:
        self._measures_from = from_classes

    def train_accuracy(self) -> Tensor:
        return self._state.fit[0] / self._state.fit[1]

    def figures(self) -> dict[str, Any]:
        return {"train_accuracy": self.train_accuracy()} if self.num_classes > self._measures_from else {}

    def settings(self) -> dict[str, Any]:
        return {"num_classes": self.num_classes or "not known yet"}

    # ---- the penalty: 1/n Σ_i w_i δ(z_i, p^{y_i}) --------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], step_number: int) -> None:
        self._group.find()
        self._step_number = step_number

    def pull(self, forward: Forward, labels: Labels | None) -> Pull:
        assert labels is not None
        self._follow(forward)
        if self.first_look.may_be_in_batch and forward.may_read:
            self.first_look.refuse_in_batch(labels.rows, self.num_classes)
        if labels.rows.ndim == 1:
            c = self._state.values.index_select(0, labels.rows)
            weights = self._state.numbers.index_select(0, labels.rows).clamp_(0.0, 1.0)
        else:
            c, weights = self._of_shares(labels.rows)
        z = forward.rows
        if self._has_masks:
            z = torch.threshold(z, MASKED, -math.inf)
        pull = pull_of(self.distance, z, c, weights, labels.number)
        predicted = z.argmax(1) if self.num_classes > self._measures_from else None
        if pull.norms is not None and not self._has_masks and labels.rows.ndim == 1:
            return pull._replace(lesson=Lesson(pull.slope, None, predicted))
        return pull._replace(lesson=self._lesson(z, labels.rows, predicted))

    def _of_shares(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture of prototypes of each row, and 1 if all its classes were seen, else 0."""
        values = self._state.values
        shares = shares.to(values)
        with torch.autocast(shares.device.type, enabled=False):
            c = shares @ self._state.known(self._has_masks)[:-1]
            if self._has_masks:
                is_unseen = shares @ (values[:-1] == UNSEEN).to(shares) > 0
                c = c.masked_fill_(is_unseen, UNSEEN)
        is_unknown = ((shares > 0) & ~self.seen).any(1)
        return c, ((shares.sum(1) > 0.5) & ~is_unknown).to(shares)

    def _follow(self, forward: Forward) -> None:
        """Follow the logits to their number, device and dtype, and see whether some are masked."""
        rows = forward.rows
        if not self.num_classes:
            self._create(rows.shape[1], torch.promote_types(rows.dtype, torch.float32), rows.device)
        if rows.shape[1] != self.num_classes:
            message = OTHER_WIDTH if self._given is None else OTHER_NUM_CLASSES
            raise ValueError(message.format(self.num_classes, rows.shape[1], tuple(forward.shape)))
        values = self._state.values
        dtype = torch.promote_types(values.dtype, rows.dtype)
        if values.device != rows.device or values.dtype != dtype:
            self._convert(rows.device, dtype)
        if not self._has_masks and forward.may_read and len(rows) and float(rows.amin()) <= MASKED:
            self._begin_masks()

    def _lesson(self, z: Tensor, labels: Tensor, predicted: Tensor | None) -> Lesson:
        """What a batch shows where the penalty has no differences, or not those that are learned."""
        shows = torch.isfinite(z) if self._has_masks or labels.ndim > 1 else None
        if labels.ndim > 1:
            return Lesson(z.to(self._one, copy=True), shows, predicted)
        known = self._state.known(self._has_masks)  # a difference from 0 where no row has shown a value
        return Lesson(difference(z, known.index_select(0, labels)), shows, predicted)

    def _begin_masks(self) -> None:
        self._has_masks = True
        begin_masks_(self._state)

    # ---- learning: p^k ← p^k + 1/n_k Σ (z_i - p^k) -------------------------------------------------------------------

    def observe(self, forward: Forward, pull: Pull, labels: Labels | None, scale: Scale, alpha: float) -> None:
        assert labels is not None
        tally = self._tally_of_step()
        values, shows, predicted = pull.lesson
        if labels.rows.ndim == 1:
            if self._has_masks:
                shown = torch.ones_like(values) if shows is None else shows.to(values)
                tally.entries_shown().index_add_(0, labels.rows, shown)
            tally.add_rows(labels.rows, values, self._one)
        else:
            self._add_shares(tally, values, shows, labels.rows.to(self._one))
        if predicted is not None:
            num_right = (predicted == classes_of(labels.rows)).sum(dtype=tally.counts.dtype)
            tally.num_right = num_right if tally.num_right is None else tally.num_right + num_right

    def _add_shares(self, tally: Tally, z: Tensor, shows: Tensor, shares: Tensor) -> None:
        """A row counts for each class by its share. A class that is masked in a row (minus infinity) moves nothing."""
        z = z.masked_fill(~shows, 0.0)
        with torch.autocast(z.device.type, enabled=False):
            numbers_known = shares.T @ shows.to(shares)
            moved = shares.T @ z - numbers_known * self._state.known(self._has_masks)[:-1]
        tally.sum_by_class()[:-1] += moved
        if self._has_masks:
            tally.entries_shown()[:-1] += numbers_known
        tally.counts[:-1] += shares.sum(0)

    def _tally_of_step(self) -> Tally:
        if self._tally is None:
            self._tally = Tally(self._no_rows)
        return self._tally

    def skip(self, forward: Forward) -> None:
        if self._group.size > 1 and not self.num_classes:  # the others wait for this one's sums
            if len(forward.shape) > 2:
                raise RuntimeError(
                    "the first batch of this rank shows no labels, so the number of classes is not known here.\n"
                    "  Fix: pass num_classes="
                )
            self._follow(forward)
        if self.num_classes:
            self._tally_of_step()

    @outside_compiled_graphs
    def learn(self, alpha: float) -> None:
        if self._group.size > 1 and self.num_classes:  # also without a batch: the other ranks wait
            self._reduce(self._tally_of_step())
        tally = self._tally
        if tally is None:
            return
        if self._has_masks:
            tally.entries_shown()
        if tally.num_right is not None:
            learn_fit_(self._state, tally, tally.num_right)
        learn_(self._state, tally, alpha, self._counts_rows)
        self._tally = None

    def _reduce(self, tally: Tally) -> None:
        """Sum over the ranks, in two reductions, or three once one of them has found masks."""
        num_right = self._one.new_zeros(()) if tally.num_right is None else tally.num_right
        has_masks = self._one.new_full((), self._has_masks)
        counts = torch.cat((tally.counts, torch.stack((num_right, has_masks))))
        self._group.all_reduce_sum(counts)
        if not self._has_masks and _sync.may_sync(self._step_number, counts) and bool(counts[-1] > 0):
            self._begin_masks()
        if self._has_masks:
            self._group.all_reduce_sum(tally.entries_shown())
        self._group.all_reduce_sum(tally.sum_by_class())
        tally.counts = counts[:-2]
        if self.num_classes > self._measures_from:
            tally.num_right = counts[-2]

    def check_values(self) -> None:
        self._group.warn_of_ranks()

    def forget(self) -> None:
        self._tally = None

    def _convert(self, device: torch.device, dtype: torch.dtype) -> None:
        """Follow the model to another device, and to a wider dtype."""
        self._state = State(*(tensor.to(device, dtype) for tensor in self._state))
        self._one = self._one.to(device, dtype)
        self._no_rows = self._no_rows.to(device, dtype)
        if self._tally is not None:
            self._tally.to(device, dtype)

    # ---- the state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self._state.saved()._asdict().items()}

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
        values = state["values"]
        # In the dtype of the logits that it was learned from.
        self._create(len(values), torch.promote_types(values.dtype, torch.float32), self._one.device)
        for name, tensor in self._state.saved()._asdict().items():
            tensor.copy_(state[name])
        if _sync.may_sync(1, values) and bool((values == UNSEEN).any()):
            self._has_masks = True
            self._state.values[-1] = UNSEEN
        self.first_look.may_be_in_batch = self._given is None and not len(values)
