"""The questions that protect users, by the moment at which they are asked."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.forecaster import Forecaster, Labels
from dcl_optim.guards import messages
from dcl_optim.guards.first_look import FirstLook, refuse_in_batch, refuse_sigmoid
from dcl_optim.guards.reading import ReadingGuard
from dcl_optim.loss.reader import LossReader
from dcl_optim.penalty.distances import SquaredDistance
from dcl_optim.penalty.weights import Checked, FollowingFit
from dcl_optim.progress import Forward, Progress, Stage
from dcl_optim.pytorch.internals import REPLICA, version, warn, warn_once
from dcl_optim.pytorch.outputs import NoLogits
from dcl_optim.pytorch.parameters import has_other_parameters, have_gradients
from dcl_optim.pytorch.synchronization import is_sync_step

SETTLED = 100  # steps, before which the prototypes follow a model that learns fast


class Guards:
    """Raise an error or warn where a script does what it hardly means.

    Args:
        name: of the optimizer.
        model, base, forecaster, reader: what is read, and never changed.
        strict: whether steps without the method, and weights that change between steps, are errors.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        base: Optimizer,
        forecaster: Forecaster,
        reader: LossReader,
        strict: bool,
    ) -> None:
        self._name = name
        self._model = model
        self._base = base
        self._forecaster = forecaster
        self._reader = reader
        self._is_strict = strict
        self._term = messages.TERMS[forecaster.reads_labels]
        self._said: set[str] = set()
        self._first_look = FirstLook()
        self._reading_guard = ReadingGuard(name, forecaster.reads_labels)
        self._is_superseded = False
        self._not_found = ""  # why an output of the model showed no logits
        # Changed by loading and by the next step or forward pass:
        self._has_learned = False  # since the start, or since a state was loaded
        self._is_loaded = False  # weights, into the model since the last step
        # Changed when a forward pass begins:
        self._step_number = 0
        self._version = 0  # of a trained parameter
        self._num_changes = 0  # of the weights since the last step

    @staticmethod
    def forward_alone(module: nn.Module, *_: Any) -> None:
        """Warn of a training forward pass of a model whose wrapper is gone, and saw none."""
        if module.training:
            warn(messages.NOT_KEPT)

    # ---- a forward pass ----------------------------------------------------------------------------------------------

    def forward_begins(self, module: nn.Module, trained: Tensor | None, progress: Progress) -> None:
        """Raise for a replica of nn.DataParallel, and for a trained parameter that changed twice without a step."""
        if REPLICA in vars(module):
            raise RuntimeError(messages.REPLICATED)
        if self._is_loaded:
            self._is_loaded = False
            warn_once(self._said, messages.WEIGHTS_LOADED.format(name=self._name))
        if self._step_number != progress.number:
            self._step_number = progress.number
            self._num_changes = 0
        now = self._version if trained is None else version(trained)
        if progress.stage is Stage.GRADIENTS and progress.learns and now != self._version:
            self._num_changes += 1
        self._version = now
        if self._num_changes > 1 and self._is_strict:
            raise RuntimeError(messages.CHANGED.format(name=self._name, base=type(self._base).__name__))

    def logits_not_found(self, error: NoLogits) -> None:
        """Raise where the forecaster needs the logits; else the script may add the term."""
        if self._forecaster.predicts:
            raise error
        self._not_found = str(error)

    def logits_replaced(self) -> None:
        """The forecaster's forward pass has put its logits where the model's were."""
        raise RuntimeError(messages.WRITES_INTO_ITS_INPUT)

    # ---- a gradient --------------------------------------------------------------------------------------------------

    def step_is_over(self) -> None:
        """A gradient has come to logits, or to a term, of before the last step."""
        raise RuntimeError(messages.STALE.format(self._name))

    def graph_of_term_is_kept(self) -> None:
        """The gradient of the term is to be differentiated again."""
        raise RuntimeError(messages.ONCE.format(self._name))

    def gradient_not_read(self, forward: Forward) -> None:
        """Raise or warn of a loss that the line does not read."""
        self._reading_guard.gradient_came(forward, self._reader)

    def gradient_read(self, forward: Forward, labels: Labels | None) -> None:
        """Refuse labels that are the rows' places; warn of several logits, of probabilities, and of certain rows."""
        self._reading_guard.num_gradients += 1
        if self._reader.is_certain:
            self._reading_guard.gradient_came(forward, self._reader)
        if forward.shape in forward.shapes_of_others:
            warn_once(self._said, messages.SEVERAL)
        if self._first_look.is_over or not forward.may_read:
            return
        self._refuse_in_batch(forward, labels)
        if self._first_look.are_probabilities(forward.rows):
            self._first_look.is_over = True
            warn_once(self._said, messages.SOFTMAX_TWICE)

    def _refuse_in_batch(self, forward: Forward, labels: Labels | None) -> None:
        if labels is not None and self._forecaster.given_num_classes is None:
            refuse_in_batch(labels.rows, forward.rows.shape[1])

    # ---- the term ----------------------------------------------------------------------------------------------------

    def first_term_called(self, progress: Progress) -> None:
        """Warn of batches that have their penalty without the term."""
        has_learned = progress.stage is Stage.GRADIENTS and not progress.is_cleared
        if self._reader.form is not None and (progress.number > 1 or has_learned):
            warn(messages.LINE_BEFORE_TERM.format(self._name))

    def term_called(self, z: Tensor, forward: Forward | None, labels: Labels | None, is_attached: bool) -> None:
        """Raise where nothing would learn, for probabilities, and for labels that are the rows' places."""
        if not is_attached:
            message = messages.SUPERSEDED if self._is_superseded else messages.DETACHED
            raise RuntimeError(message.format(self._name))
        if forward is None:
            raise ValueError(messages.NOT_OF_THE_MODEL.format(tuple(z.shape)))
        if self._first_look.is_over:
            return
        if labels is not None:
            refuse_sigmoid(z)
        if not forward.may_read:
            return
        self._refuse_in_batch(forward, labels)
        if self._first_look.are_probabilities(forward.rows):
            if labels is not None:
                raise ValueError(messages.PROBABILITIES)
            warn_once(self._said, messages.PROBABILITIES)  # which are outputs that DCL may have

    # ---- a step ------------------------------------------------------------------------------------------------------

    def closure_ends(self, uses_term: bool) -> None:
        """Raise for an optimizer that compares values of the loss, without the term in it."""
        if isinstance(self._base, torch.optim.LBFGS) and not uses_term:
            raise RuntimeError(messages.MINIMIZES_A_VALUE.format(self._name, self._term))

    def first_step_begins(self) -> None:
        """Warn of a backward pass that brought no gradient to what the optimizer trains."""
        if not have_gradients(self._base):
            warn(messages.NO_GRADIENTS)

    def step_has_no_penalty(self, progress: Progress, uses_term: bool, is_attached: bool) -> None:
        """Raise for gradients without a penalty; warn if the script adds the term elsewhere."""
        stage = progress.stage
        if self._is_superseded:
            raise RuntimeError(messages.SUPERSEDED.format(self._name))
        if not is_attached:
            return
        if stage is Stage.CALLED and self._is_strict:
            raise RuntimeError(messages.NOT_ADDED.format(self._name))
        if not have_gradients(self._base):
            if stage is Stage.NOTHING and progress.number == 2:  # scripts step once so that no scheduler warns
                warn(messages.NO_GRADIENTS)
            return
        if uses_term and stage is not Stage.NOTHING:
            warn_once(self._said, messages.WITHOUT_TERM.format(self._name))
        elif self._is_strict:
            raise RuntimeError(self._not_regularized(stage))

    def _not_regularized(self, stage: Stage) -> str:
        seen, fix = messages.SEEN_AND_FIX[stage]
        if stage is Stage.FORWARD and self._not_found:
            return self._not_found
        if stage is Stage.NOTHING and not self._model.training:
            seen, fix = messages.EVAL_MODE
        elif stage is Stage.NOTHING and has_other_parameters(self._base, self._model):
            return messages.OF_AN_ENGINE.format(self._name, self._term)
        return messages.NOT_REGULARIZED.format(self._name, seen, fix.format(self._term))

    def step_ends(self, progress: Progress, last: Any, weight: Checked | FollowingFit) -> None:
        """Warn of a batch that was not finite, and of a weight that is too large."""
        self._has_learned = True
        if progress.not_finite:
            warn_once(self._said, messages.NOT_FINITE)
        if progress.number >= SETTLED and last is not None and is_sync_step(progress.number):
            self._check_strength(last, weight)

    def _check_strength(self, last: Any, weight: Checked | FollowingFit) -> None:
        """Warn of a penalty with a given weight that is more than half of log K, the loss of a guess. Synchronizes."""
        num_classes = self._forecaster.num_classes
        if num_classes < 2 or isinstance(weight, FollowingFit):
            return
        if not isinstance(self._forecaster.distance, SquaredDistance):  # others have other sizes
            return
        penalty = float(last.weight) * float(last.penalty())
        guess = math.log(num_classes)
        if guess / 2.0 < penalty < math.inf:
            message = messages.TOO_STRONG.format(
                name=self._name, penalty=penalty, guess=guess, classes=num_classes, weight=float(last.weight)
            )
            warn_once(self._said, message, about="strength")

    # ---- what happens between steps ----------------------------------------------------------------------------------

    def superseded(self) -> None:
        """Another optimizer has wrapped the model."""
        self._is_superseded = True

    def detached(self) -> None:
        """The script has ended the method."""
        self._is_superseded = False

    def model_loaded(self) -> None:
        """Weights were loaded into the model."""
        self._is_loaded = self._has_learned

    def state_loaded(self) -> None:
        """What was learned is of the model's weights: a state of the optimizer was loaded, or the companion reset."""
        self._first_look.is_over = self._forecaster.num_classes > 0
        self._has_learned = False
        self._is_loaded = False
