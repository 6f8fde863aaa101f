"""Where a forward's labels come from: the criterion, the model's arguments, a call ahead of it, or the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dcl_optim._torch import current_backward, warn
from dcl_optim.forecaster import ForwardRecord
from dcl_optim.hooks.arguments import Place, find_labels, labels_at
from dcl_optim.hooks.cross_entropy import Reading, may_be_read

UNREADABLE = (
    "the labels of this batch cannot be read off the loss's gradient, which is not that of a softmax cross-entropy "
    "with one class a row (mixed labels as of mixup or CutMix, a sum of several losses, logits that the loss divides, "
    "shifts or adds a margin to, a loss of other logits than those found in the model's output)"
)
FIXES = (
    "pass criterion=<the loss module> or targets=<the model's keyword with the labels>, or call set_targets(labels) "
    "before the forward. DCPOptimizer is for softmax classifiers: models with sigmoid outputs (binary, multi-label) "
    "and regression take DCLOptimizer, which needs no labels"
)
HIDDEN = (
    "the model computes its own loss and is compiled, so the gradient that its logits get from the loss stays inside "
    "the compiled backward, and the labels cannot be read off it; nor is there one argument of the model whose "
    "cross-entropy with the logits is that loss: pass targets=<the model's keyword with the labels>, "
    "and class_dim=-1 where the logits are (batch, time, classes), or call set_targets(labels) before the forward"
)
FORWARDS_TO_BE_SURE = 3  # in which the same argument has to be the labels, before that is no longer asked
Targets = str | Callable[[tuple[Any, ...], dict[str, Any]], Tensor]


class Labels:
    """Finds the labels of each training forward; those given ahead of it are ``of_next_forward``."""

    def __init__(self, source: Targets | None) -> None:
        if source is not None and not isinstance(source, str) and not callable(source):
            raise TypeError(f"targets must be a keyword's name or a callable (args, kwargs) -> labels, got {source!r}")
        self._source = source
        self._times_found = 0
        self._place: Place | None = None  # of the labels among the model's arguments, where that is needed
        self._has_warned = False  # that some labels could not be read
        self.start(has_read=False)

    def start(self, has_read: bool) -> None:
        """Drop labels that were given ahead; say whether some were read off gradients, as before a resumption."""
        self._has_read = has_read
        self.of_next_forward: Tensor | None = None
        self._of_this_forward: Tensor | None = None

    def before_forward(self) -> None:
        """Take the labels that were given ahead for the forward that begins; one that does not count drops them.

        A recomputation inside backward is no next forward; one of a model inside a reentrant checkpoint, whose first
        forward did not count, gets that one's labels.
        """
        if current_backward() == -1:
            self._of_this_forward, self.of_next_forward = self.of_next_forward, None

    def read(self, record: ForwardRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give a forward the labels that are known when the model is called."""
        record.targets, self._of_this_forward = self._of_this_forward, None
        if self._source is None:
            return
        found = kwargs.get(self._source) if isinstance(self._source, str) else self._source(args, kwargs)
        if found is None and isinstance(self._source, str):
            raise ValueError(f"targets={self._source!r}: the model was called without that keyword")
        if record.targets is not None:
            raise RuntimeError(
                "one forward was given labels twice, by targets= and by set_targets: give them one way only"
            )
        record.targets = found

    def take(self, record: ForwardRecord, targets: Any) -> None:
        """Give a forward the labels that the criterion was called with."""
        if record.targets is None and record.criterion_targets is not None:
            raise RuntimeError(
                "the criterion was called twice on one forward: give mixed labels (mixup, CutMix) as one tensor of "
                "soft labels, to the criterion or to set_targets. Of a model with several heads, whose criterion does "
                "not get the very tensor that the model gave, pass as criterion= a loss module that only the main "
                "head's loss calls; or leave criterion= out and call set_targets"
            )
        record.criterion_targets = targets

    def are_missing(self, record: ForwardRecord) -> bool:
        """Whether a forward's labels are to be read off the gradient, since the script gave none."""
        given = record.targets is not None or record.criterion_targets is not None
        return not given and record.classes is None and record.read_labels is None

    def find_in_arguments(
        self, record: ForwardRecord, z: Tensor, loss: Tensor, arguments: tuple[Any, ...], class_dim: int | None
    ) -> int | None:
        """Give a forward its labels where no gradient is going to tell: of a loss that a compiled model took itself.

        They are the argument whose cross-entropy with the logits is that loss; which one that is stays. The class
        dimension of the logits, or None where no argument is it.
        """
        if self._times_found < FORWARDS_TO_BE_SURE:
            place = find_labels(arguments, z, loss)
            self._place, former = place, self._place or place
            if place is None or place != former:
                return None
            self._times_found += 1
        if self._place is None or class_dim not in (None, self._place.class_dim):
            return None
        found = labels_at(self._place, arguments, z.shape)
        if found is None:
            return None
        record.read_labels = found, False
        return self._place.class_dim

    def take_read(self, record: ForwardRecord, reading: Reading, gradient: Tensor, look: bool) -> None:
        """Give a forward the labels that its gradient told.

        Until some have been read, those that cannot be are an error. Later ones take no part, and a warning says so
        once; a device is asked only if ``look`` says so, since that synchronises it.
        """
        record.read_labels = reading.labels, reading.all_labelled
        if self._has_read and (self._has_warned or not look):
            return
        if bool(reading.readable):
            self._has_read = self._has_read or bool((reading.labels < record.logits.shape[1]).any())
        elif may_be_read(record.logits, record.rows(gradient)):
            if not self._has_read:
                raise RuntimeError(f"{UNREADABLE}: {FIXES}")
            self._has_warned = True
            warn(f"{UNREADABLE}, as those of former batches could: such batches take no part in the penalty; {FIXES}")
