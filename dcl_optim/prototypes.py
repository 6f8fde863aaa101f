"""Class prototypes: one vector of logits per class in place of a second network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcl_optim import distributed, functional
from dcl_optim.forecaster import Forecaster, Forward, Scale, check_tensors
from dcl_optim.functional import Distance

REDUCTIONS = (*functional.REDUCTIONS, "per_class")


class Prototypes(Forecaster):
    r"""The prototypes :math:`p^k` of Deep Companion Prototype (the paper's appendix, Equations 5 and 6).

    Forecast: the prototype of each row's class; with soft labels the mixture :math:`\sum_k t_{ik}\,p^k`, and rows
    weigh :math:`t_{ik}` in class k's mean, which for one-hot labels is the same thing. Rows of an ignored label, and
    of a class that no step has seen, have no forecast and give no penalty.

    Args:
        num_classes: K, at least 1; the logits must have as many.
        per_class: average the penalty within each class and sum over the classes (one reading of Equation 5)
            instead of averaging over the batch.
        ignore_index: the label of rows to leave out.
        like: a tensor whose device, and dtype at float32 or wider, the prototypes take.

    Attributes:
        values: the prototypes, (K, K); zero for a class that no step has seen.
        seen: which classes have one, (K,) bool.
    """

    draws = False

    def __init__(self, num_classes: int, per_class: bool, ignore_index: int, like: Tensor) -> None:
        self._per_class, self._ignore_index = per_class, ignore_index
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.values = torch.zeros(num_classes, num_classes, dtype=dtype, device=like.device)
        self.seen = torch.zeros(num_classes, dtype=torch.bool, device=like.device)
        self._observed: Tensor | None = None  # class totals since the last step
        self._alpha = 0.0
        # What is known without a look at a device: on the CPU, where looking costs nothing. Then nothing needs masking.
        self._all_seen = self._all_labelled = False

    def membership(self, targets: Tensor, forward: Forward) -> Tensor:
        """Check labels and lay them out as rows: classes (N,), K where ignored; or soft labels (N, K).

        Raises:
            ValueError: labels of the wrong number or range; on the CPU only, since looking would synchronise a GPU,
                whose own index kernels assert.
            TypeError: labels that are neither integers nor one distribution a row.
        """
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets must be a tensor of labels, got {type(targets).__name__}")
        rows, classes = forward.logits.shape
        if classes != len(self.values):
            raise ValueError(f"num_classes={len(self.values)} but the model gives {classes} logits; pass that number")
        if targets.dtype.is_floating_point and targets.shape == forward.shape:
            self._all_labelled = False
            return forward.rows(targets.detach())
        if targets.dtype.is_floating_point or targets.dtype == torch.bool:
            raise TypeError(
                f"targets of dtype {targets.dtype} and shape {tuple(targets.shape)} are neither class indices nor soft "
                f"labels of the logits' shape {tuple(forward.shape)}"
            )
        if targets.numel() != rows:
            raise ValueError(f"targets has {targets.numel()} labels for {rows} rows of logits; see class_dim= too")
        flat = targets.ndim == 1 and targets.dtype == torch.int64
        return self._checked(targets if flat else targets.detach().reshape(-1).long())

    def _checked(self, labels: Tensor) -> Tensor:
        classes, ignore = len(self.values), self._ignore_index
        self._all_labelled = False
        if labels.device.type == "cpu":
            low, high = (int(bound) for bound in labels.aminmax())
            if low >= 0 and high < classes and not 0 <= ignore < classes:
                self._all_labelled = True
                return labels
            wrong = ((labels < 0) | (labels >= classes)) & (labels != ignore)
            if wrong.any():
                raise ValueError(
                    f"targets has label {int(labels[wrong][0])}; labels must lie in 0..{classes - 1} or equal "
                    f"ignore_index={ignore}"
                )
        return labels.masked_fill(labels == ignore, classes)

    def penalty(self, forward: Forward, distance: Distance) -> tuple[Tensor, Tensor]:
        given = forward.criterion_targets if forward.targets is None else forward.targets
        if given is None:
            raise RuntimeError(
                "a training forward reached its backward without labels: hand the loss module over as criterion=, "
                "name the model's keyword that holds them as targets=, or call set_targets(labels) before the forward"
            )
        self._move_to(forward.logits)
        z = forward.logits.to(self.values.dtype)
        forward.targets = self.membership(given, forward)
        if self._all_seen and self._all_labelled and not self._per_class:
            return functional.value_and_gradient(distance, z, self.values.index_select(0, forward.targets))
        forecast, known, labelled = self._forecast(z, forward.targets)
        if self._per_class:
            return self._penalty_per_class(z, forecast, known, forward.targets, distance)
        if getattr(distance, "func", None) in (functional.mse, functional.l1, functional.kl):
            # These vanish, with their gradient, where the forecast is z itself: no need to know which rows.
            value, gradient = functional.value_and_gradient(distance, z, torch.where(known[:, None], forecast, z))
            share = len(z) / labelled.sum().clamp(min=1)
            return value * share, gradient * share
        if not known.any():
            return z.new_zeros(()), torch.zeros_like(z)
        value, gradient = functional.value_and_gradient(distance, z[known], forecast[known])
        share = known.sum() / labelled.sum()
        return value * share, torch.zeros_like(z).masked_scatter_(known[:, None], gradient * share)

    def _forecast(self, z: Tensor, membership: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Forecast rows, which rows have one, which rows are labelled."""
        if membership.ndim == 2:
            shares = membership.to(z.dtype)
            known = ~((shares > 0) & ~self.seen).any(1)
            return shares @ self.values, known, torch.ones_like(known)
        labelled = membership < len(self.values)
        index = membership.clamp(max=len(self.values) - 1)
        return self.values.index_select(0, index), self.seen.index_select(0, index) & labelled, labelled

    def _penalty_per_class(
        self, z: Tensor, forecast: Tensor, known: Tensor, membership: Tensor, distance: Distance
    ) -> tuple[Tensor, Tensor]:
        if membership.ndim == 2:
            raise TypeError("reduction='per_class' needs hard labels; soft labels belong to several classes at once")
        classes = membership[known].unique()

        def summed(rows: Tensor, forecasts: Tensor) -> Tensor:
            parts = [distance(rows[membership == k], forecasts[membership == k]) for k in classes]
            return torch.stack(parts).sum() if parts else rows.sum() * 0.0

        return functional.value_and_gradient(summed, z, forecast)

    def observe(self, forward: Forward, distance: Distance, alpha: float, scale: Scale) -> None:
        assert forward.targets is not None
        z = forward.logits.to(self.values.dtype)
        totals = functional.class_totals(z, forward.targets, len(self.values))
        self._observed = totals if self._observed is None else self._observed + totals
        self._alpha = alpha

    def forget(self) -> None:
        self._observed = None

    def step(self) -> None:
        totals = self._observed
        if totals is not None:
            distributed.add_up([totals])
            share: float | Tensor = 1.0 - self._alpha
            if not self._all_seen:
                first = ~self.seen[:, None]  # the first mean becomes the prototype
                share = torch.full_like(totals[:, -1:], 1.0 - self._alpha).masked_fill_(first, 1.0)
                self.seen = self.seen | (totals[:, -1] > 0)
                self._look_at_seen()
            self.values = functional.update_prototypes(self.values, totals, share)
        self.forget()

    def _look_at_seen(self) -> None:
        self._all_seen = self.seen.device.type == "cpu" and bool(self.seen.all())

    def _move_to(self, z: Tensor) -> None:
        """Follow the model to another device, and to a wider dtype."""
        dtype = torch.promote_types(self.values.dtype, z.dtype)
        if self.values.device != z.device or self.values.dtype != dtype:
            self.values, self.seen = self.values.to(z.device, dtype), self.seen.to(z.device)
            self._look_at_seen()

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "seen": self.seen}

    def check_state(self, state: dict[str, Any]) -> None:
        check_tensors(state, self.state_dict(), "prototypes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forget()
        self.values = state["values"].to(self.values, copy=True)
        self.seen = state["seen"].to(self.seen, copy=True)
        self._look_at_seen()
