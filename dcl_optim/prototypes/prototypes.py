"""Class prototypes: one vector of logits per class in place of a second network."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dcl_optim.forecaster import Forecaster, Labels
from dcl_optim.penalty.distances import Distance
from dcl_optim.penalty.layout import Masks, difference
from dcl_optim.penalty.pull import Pull, Scale, pull_of
from dcl_optim.progress import Forward
from dcl_optim.prototypes.labels import classes_of
from dcl_optim.prototypes.tally import NEVER, State, Tally, learn_, learn_fit_, new_state
from dcl_optim.pytorch.arguments import check_state
from dcl_optim.pytorch.ranks import DataParallelGroup

UPDATES = ("rows", "batch")
MAX_BYTES = 2**30  # of the (K, K) prototypes
OTHER_NUM_CLASSES = (
    "num_classes={0} but there are {1} logits a row; pass num_classes={1}, or logits with the classes in dimension 1"
)
OTHER_WIDTH = (
    "the number of logits a row varies: the first batch, or the loaded state, had {} logits a row, this one has {}. "
    "After a change of the classes build the base optimizer and wrap it again. For two heads add the penalty of one. "
    "Positions in an input, and scores against the rows of a batch, are no classes: use DCLOptimizer"
)


class Prototypes(Forecaster):
    r"""The prototypes :math:`p^k` of Deep Companion Prototype (the paper's appendix, Equations 5 and 6).

    Prediction: the prototype of each row's class; with soft labels the mixture :math:`\sum_k t_{ik}\,p^k`, and rows
    weigh :math:`t_{ik}` in the mean of class k. The penalty is :math:`\frac1n\sum_i w_i\,\delta(z_i, p^{y_i})` over the
    n rows with a label; :math:`w_i = \min(1, n_{y_i})`, which is 0 for a class that no step has seen. With soft labels
    it is 1 once all classes of the row were seen: each has a share of many rows, so that a small n is not an old one.

    A logit that is not finite, or 900 below the largest of its row, is masked: it neither pulls nor is learned from.

    The tables have a row K for the rows without a label, which counts as a class that no step has seen.

    Args:
        num_classes: K, or None for that of the first logits.
        update: ``"rows"`` for a mean of rows, ``"batch"`` for one in which each batch counts alike (Equation 6).
        distance: a function (z, c) of rows (N, K) that returns one value a row.
        model: whose device and dtype the prototypes take on a rank that had no batch yet.
        group: the ranks that train the model together.

    Examples:
        >>> from dcl_optim.penalty.distances import mse
        >>> model = torch.nn.Linear(4, 3)
        >>> group = DataParallelGroup(model, process_group=None)
        >>> Prototypes(3, "rows", mse, model, group).values.shape
        torch.Size([0, 0])
    """

    reads_labels = True
    predicts = False

    def __init__(
        self, num_classes: int | None, update: str, distance: Distance, model: nn.Module, group: DataParallelGroup
    ) -> None:
        self.distance = distance
        self.given_num_classes = num_classes
        self._counts_rows = update == "rows"
        self._model = model
        self._group = group
        self._measures_from = math.inf  # with more classes the accuracy is measured
        self._masks = Masks()
        self._is_agreed = False  # whether the ranks have the same number of classes
        self._tally: Tally | None = None
        self.load_state_dict({})

    def _create(self, num_classes: int, like: Tensor) -> None:
        """Create the prototypes for the first logits, or where none came yet for those that a parameter suggests."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        size = num_classes**2 * dtype.itemsize
        if size > MAX_BYTES:
            raise ValueError(
                f"num_classes={num_classes}: the prototypes would need {size / 2**30:.1f} GiB (limit 1 GiB, 16,384 "
                "classes).\n  Fix: use DCLOptimizer, which keeps none (no gain was measured at this size)"
            )
        if self.given_num_classes not in (None, num_classes):
            raise ValueError(OTHER_NUM_CLASSES.format(self.given_num_classes, num_classes))
        self._hold(new_state(num_classes, dtype, like.device))

    def _hold(self, state: State) -> None:
        self.num_classes = state.values.shape[1]
        self._state = state
        self._no_rows = torch.zeros_like(state.numbers)  # the counts of an empty batch
        self._no_rows[-1] = NEVER  # so that no step gives row K a number above 0

    @property
    def values(self) -> Tensor:
        """A copy of all prototypes, (K, K); (0, 0) before K is known."""
        return self._state.values[:-1].clone()

    def measure_accuracy(self, from_classes: float) -> None:
        self._measures_from = from_classes

    def train_accuracy(self) -> Tensor:
        return self._state.fit[0] / self._state.fit[1]

    def logs(self) -> dict[str, Any]:
        return {"train_accuracy": self.train_accuracy()} if self.num_classes > self._measures_from else {}

    # ---- the penalty: 1/n Σ_i w_i δ(z_i, p^{y_i}) --------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], step_number: int) -> None:
        self._group.find()

    def pull(self, forward: Forward, labels: Labels | None) -> Pull:
        assert labels is not None
        z = forward.rows
        known = self._state.values
        if z.shape[1] != self.num_classes or z.device != known.device or z.dtype.itemsize > known.dtype.itemsize:
            self._follow(z)
        if forward.may_read:
            self._masks.look_for(z)
        if self._masks.are_there:
            z = self._masks.left_out(z)
        is_soft = labels.rows.ndim > 1
        # Rows without a label have class K, whose prototype is 0 and whose number stays below 0: their weight is 0.
        if is_soft:
            c, weights = self._of_shares(labels.rows)
        else:
            c = self._state.values.index_select(0, labels.rows)
            weights = self._state.numbers.index_select(0, labels.rows).clamp_(0.0, 1.0)
        pull = pull_of(self.distance, z, c, weights, labels.number)
        shown = pull.slope  # z - p, which the tally may overwrite; of soft labels z
        if is_soft:
            shown = z.to(self._state.values, copy=True)
        elif pull.norms is None:  # whose slope is no difference
            shown = difference(z, c)
        predicted = z.argmax(1) if self.num_classes > self._measures_from else None
        return pull._replace(lesson=(shown, predicted))

    def _follow(self, z: Tensor) -> None:
        """Create the prototypes at the first logits; those that were loaded follow to their device and dtype."""
        if not self.num_classes:
            self._create(z.shape[1], z)
        if z.shape[1] != self.num_classes:
            raise ValueError(OTHER_WIDTH.format(self.num_classes, z.shape[1]))
        dtype = torch.promote_types(self._state.values.dtype, z.dtype)
        self._hold(State(*(tensor.to(z.device, dtype) for tensor in self._state)))

    def _of_shares(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture of prototypes of each row, and 1 if all its classes were seen, else 0."""
        state = self._state
        shares = shares.to(state.values)
        with torch.autocast(shares.device.type, enabled=False):
            c = shares @ state.values[:-1]
        is_unknown = ((shares > 0) & (state.numbers[:-1] <= 0)).any(1)
        return c, ((shares.sum(1) > 0.5) & ~is_unknown).to(shares)

    # ---- learning: p^k ← p^k + 1/n_k Σ (z_i - p^k) -------------------------------------------------------------------

    def observe(self, forward: Forward, pull: Pull, labels: Labels | None, scale: Scale, alpha: float) -> None:
        assert labels is not None
        tally = self._tally = self._tally or Tally(self._no_rows)
        shown, predicted = pull.lesson
        if labels.rows.ndim == 1:
            tally.add_rows(labels.rows, shown)
        else:
            tally.add_shares(labels.rows.to(shown), shown, self._state.values[:-1], self._masks.are_there)
        if predicted is not None:
            tally.num_right = tally.num_right + (predicted == classes_of(labels.rows)).sum(dtype=shown.dtype)

    def learn(self, alpha: float) -> None:
        has_ranks = self._group.size > 1 and self._all_know_classes()
        if not self.num_classes:
            return
        tally = self._tally or Tally(self._no_rows)  # without a batch the prototypes age, and the other ranks wait
        if has_ranks:
            self._reduce(tally)
        if self.num_classes > self._measures_from:
            learn_fit_(self._state, tally)
        learn_(self._state, tally, alpha, self._counts_rows)
        self._tally = None

    def _all_know_classes(self) -> bool:
        """Whether a rank knows the number of classes; then all do."""
        if not self._is_agreed:
            number = self._group.largest(self.num_classes)
            if number and not self.num_classes:
                self._create(number, next(self._model.parameters()))
            self._is_agreed = number > 0
        return self._is_agreed

    def _reduce(self, tally: Tally) -> None:
        """Sum over the ranks, in two reductions."""
        counts = torch.cat((tally.counts, torch.as_tensor(tally.num_right).to(tally.counts).reshape(1)))
        self._group.all_reduce_sum(counts)
        self._group.all_reduce_sum(tally.sum_by_class())
        tally.counts, tally.num_right = counts[:-1], counts[-1]

    def check_values(self) -> None:
        self._group.warn_of_ranks()

    def forget(self) -> None:
        self._tally = None

    # ---- the state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if not self.num_classes:
            return {}
        return {name: tensor.clone() for name, tensor in self._state.saved().items()}

    def create_state(self) -> None:
        if not self.num_classes and self.given_num_classes:
            self._create(self.given_num_classes, next(self._model.parameters()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # empty before the first batch
            num_classes = self.given_num_classes or self.num_classes or len(state["numbers"])
            expected = new_state(num_classes, torch.float32, torch.device("meta")).saved()
            check_state(state, expected, "prototypes")
        values = state.get("values", torch.zeros(0, 0))
        loaded = new_state(len(values), values.dtype, values.device)
        places = loaded.saved()
        for name, value in state.items():
            places[name].copy_(value)
        self._hold(loaded)
        self.forget()
