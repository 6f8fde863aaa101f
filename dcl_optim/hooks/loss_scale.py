r"""What the loss was multiplied by before backward: a gradient scaler's scale, 1/accumulation steps, a weight.

The penalty has to carry the same factor s, and backward does not tell it. Three ways, the first that applies wins:

1. ``loss_scale=`` given by the user: a number, a ``GradScaler``, a callable without arguments.
2. ``criterion=`` given by the user: the gradient that arrives at the criterion's output *is* s; where it sums
   (``reduction="sum"``), times the number of terms that its mean would divide by.
3. ``"auto"``: a softmax cross-entropy's gradient of the logits tells s (:mod:`dcl_optim.hooks.cross_entropy`). Where it
   does not (another loss, per-sample or class weights, mixed labels), the gradient that arrives at the model's own loss
   (``output.loss``) is s; without one, s = 1.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from dcl_optim._torch import warn
from dcl_optim._validation import check_positive, is_number
from dcl_optim.forecaster import ForwardRecord, Scale
from dcl_optim.hooks.cross_entropy import Reading, choose, may_be_read

UNREADABLE = (
    "the loss scale (gradient scaler, accumulation, weights) cannot be read off this loss's gradient, so the penalty "
    "is added with factor 1; pass criterion=<the loss module>, or loss_scale=<number, GradScaler or callable> (1 if "
    "there is no factor), to the optimizer"
)
SEVERAL_HEADS = (
    "the criterion was called on several tensors for one forward, none of which is the output of the model as it "
    "returned it (logits that were resized or cast, of the main head and of others?), so nothing says which loss is "
    "the main head's, nor what it is multiplied by. Pass as criterion= a loss module that only the main head's calls, "
    "or call it on the model's output as it is, or leave criterion= out and pass loss_scale= (1 if there is no factor)"
)


class LossScale:
    """Resolves s for one backward after another.

    Args:
        source: ``"auto"``, a positive number, an object with a ``scale(tensor)`` method (``torch.amp.GradScaler``), or
            a callable without arguments that returns a finite number or a scalar tensor.

    Raises:
        ValueError: an unknown name, or a number that is not positive and finite.
        TypeError: anything else.

    Examples:
        >>> LossScale(1024.0).source
        1024.0
        >>> LossScale("half")
        Traceback (most recent call last):
        ...
        ValueError: loss_scale='half' is unknown; pass 'auto', a number, a GradScaler or a callable
    """

    def __init__(self, source: Any) -> None:
        known = source == "auto" if isinstance(source, str) else callable(source) or hasattr(source, "scale")
        if isinstance(source, str) and not known:
            raise ValueError(f"loss_scale={source!r} is unknown; pass 'auto', a number, a GradScaler or a callable")
        if is_number(source):
            check_positive("loss_scale", source)
        elif not known:
            raise TypeError(f"loss_scale must be 'auto', a number, a GradScaler or a callable, got {source!r}")
        self.source = source
        self._settled = False  # whether a warning is out, or looking again would synchronise a device again

    def resolve(
        self, record: ForwardRecord, gradient: Tensor, reading: Reading | None, backward: int, several: bool
    ) -> Scale:
        """Find s for a backward, by its number, that brought a gradient to a forward's logits.

        ``reading`` is what that gradient told; None where the criterion or the script has said s.

        A gradient that cannot be read is worth a warning where a wrong s would matter: with float16 logits, and where
        this is not the first backward since the last step (``several``).

        Raises:
            RuntimeError: the criterion's losses are of several heads, and which is the main one's is unknown.
        """
        if self.source != "auto":
            return self._given(gradient)
        if reading is None or record.criterion_scale[0] == backward:
            if record.has_several_heads:
                raise RuntimeError(SEVERAL_HEADS)
            return record.criterion_scale[1]
        if record.model_scale[0] == backward:
            return choose(reading.has_scale, reading.scale, record.model_scale[1])
        if (several or gradient.dtype == torch.float16) and not self._settled and len(record.logits):
            if bool(reading.has_scale):
                self._settled = gradient.device.type != "cpu"
            elif may_be_read(record.logits, gradient):  # not of a step that will be skipped
                self._settled = True
                warn(UNREADABLE)
        return reading.scale

    def _given(self, gradient: Tensor) -> Scale:
        if isinstance(self.source, numbers.Real):
            return float(self.source)
        if hasattr(self.source, "scale"):
            scale: Tensor = self.source.scale(torch.ones((), device=gradient.device))
            return scale
        given = self.source()
        if isinstance(given, Tensor) and given.numel() == 1:
            if given.device.type != "cpu":  # taken as it is: a look would synchronise
                return given.reshape(())
            given = given.item()
        if not is_number(given):
            raise TypeError(f"loss_scale's callable must return a number or a scalar tensor, got {given!r}")
        if not math.isfinite(given):
            raise ValueError(f"loss_scale's callable returned {given!r}; it must be a finite number")
        return float(given)
