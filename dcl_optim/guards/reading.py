"""What is said about losses whose gradient cannot be read, and when a run ends for it.

Not in guards.py, since it keeps counts: how many gradients were not read, and of how many it has told.
"""

from __future__ import annotations

from dcl_optim.guards.messages import TERMS
from dcl_optim.loss.reader import PATIENCE, LossReader, Unread
from dcl_optim.progress import Forward, Outcome
from dcl_optim.pytorch.internals import warn

TRUSTED = 100  # steps, after which a loss is what it showed, and unread batches are told of again
UNREADABLE = (
    "{name} cannot read {what} from the loss's gradient, which is not that of a plain softmax cross-entropy over the "
    "model's logits.\n  Seen: {seen}.\n  Fix: {fix}. See docs/losses.md"
)
SEEN = {
    Unread.NO_CLASSES: (
        "one logit a row, as of binary classification or regression, which has no classes, or no batch dimension"
    ),
    Unread.SUMS: (
        "the gradient's rows do not sum to 0, as of sigmoid outputs, probabilities, regression, hidden states that "
        "the loss takes to the last layer, or another term"
    ),
    Unread.FACTORS: (
        "the rows have different factors, as with class weights, focal or symmetric losses, or more than one class, as "
        "with mixup, or the logits are changed before the loss"
    ),
    Unread.NOTHING: (
        "batches that show no form: single rows of two classes, a model that is certain of every row, or other values "
        "than logits"
    ),
}
CERTAIN = (
    "the model is certain of every row of the first batches. {name} reads {what} as those of a plain softmax "
    "cross-entropy, whose form their gradients have; certain rows would hide a class weight.\n"
    "  Fix: if the loss weighs classes, add the penalty to it, {term}. See docs/losses.md"
)


class ReadingGuard:
    """Looks at the reader after each gradient: raises if the loss has no form that is known, warns of what is left out.

    Args:
        name: of the optimizer, for messages.
        reads_labels: whether labels are needed, or the factor alone.

    Attributes:
        num_gradients: since a form is known; guards.py counts those that were read.
    """

    def __init__(self, name: str, reads_labels: bool) -> None:
        self._term = TERMS[reads_labels]
        self._name = name
        self._reads_labels = reads_labels
        self._what = "the labels" if reads_labels else "the factor"
        self._num_silent = 0  # gradients that told nothing, before a form was known
        self._num_said = 0  # unread gradients of which the last warning told
        self._num_before = 0  # unread gradients before a form was known
        self.num_gradients = 0
        self._has_said_certain = False

    def gradient_came(self, forward: Forward, reader: LossReader) -> None:
        """Raise or warn about the gradient that was read last."""
        if reader.is_certain and not self._has_said_certain:
            self._has_said_certain = True
            warn(CERTAIN.format(name=self._name, what=self._what, term=self._term))
        if reader.unread is None:
            return
        if reader.form is None:
            self._num_before = reader.num_skipped
            if reader.unread is Unread.ROUNDING:
                return
            self._num_silent += 1
            if reader.unread is not Unread.NOTHING or self._num_silent >= PATIENCE:
                raise RuntimeError(self._message(forward, reader.unread))
            return
        if forward.outcome is not Outcome.OPEN:  # the forecaster has learned from another loss of these logits
            return
        self.num_gradients += 1
        if forward.step_number <= TRUSTED and self._are_most(reader.num_skipped - self._num_before):
            raise RuntimeError(self._message(forward, reader.unread))
        if self._is_news(forward, reader.num_skipped):
            so_far = f", {reader.num_skipped} so far" if self._num_said else ""
            self._num_said = reader.num_skipped
            warn(f"a batch gets no penalty{so_far}: {self._message(forward, reader.unread)}")

    def _are_most(self, num_unread: int) -> bool:
        """Whether three of four gradients are unread: all losses are alike where the first logits are."""
        return num_unread >= max(PATIENCE, 0.75 * self.num_gradients)

    def _is_news(self, forward: Forward, num_skipped: int) -> bool:
        """Whether this is the first unread gradient, or the number has doubled."""
        return not self._num_said or (forward.step_number > TRUSTED and num_skipped >= 2 * self._num_said)

    def _message(self, forward: Forward, unread: Unread) -> str:
        fix = f"add the penalty to the loss, {self._term}"
        if self._reads_labels:
            fix += "; without labels use DCLOptimizer"
        if forward.shapes_of_others:
            fix = f"if the logits are another tensor of the output, pass logits=lambda output: output[1]; else {fix}"
        return UNREADABLE.format(name=self._name, what=self._what, seen=SEEN[unread], fix=fix)
