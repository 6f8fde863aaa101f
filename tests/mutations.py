"""Deliberate faults of the package, each a change that a contributor might make: does a test of the default suite fail?

``python -m tests.mutations`` makes them one at a time in a copy of the working tree, runs the test files that a fault
names, and the whole default suite if those pass; in the end the tests that failed have to pass without a fault.
``--list`` shows the faults; names, or parts of them, choose some.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.conftest import DEFAULT

HERE = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", "-p", "no:randomly")
HANGS, HANGS_AFTER = ", which hangs", 240  # seconds without a line


@dataclass(frozen=True)
class Fault:
    """One change: in a file of the package the text ``old``, which is there once, becomes ``new``.

    ``tests`` are the files that should see it, tests/test_*.py of the default suite, without what all names share.
    """

    name: str
    file: str
    old: str
    new: str
    effect: str
    tests: str

    @property
    def paths(self) -> list[str]:
        return [f"tests/test_{name}.py" for name in self.tests.split()]

    def made_in(self, root: Path) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the text is not there, or several times.
        """
        text = (root / "dcl_optim" / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: dcl_optim/{self.file} has {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)


FAULTS = [
    # ---- the penalty at the logits -----------------------------------------------------------------------------------
    Fault(
        "penalty-sign",
        "forecaster.py",
        "slope, factor, radius = self.rows.slope, weight * self.rows.factor, self",
        "slope, factor, radius = self.rows.slope, -weight * self.rows.factor, self",
        "the penalty pushes the model away from the prediction",
        "reference",
    ),
    Fault(
        "weight-squared",
        "forecaster.py",
        "slope, factor, radius = self.rows.slope, weight * self.rows.factor, self",
        "slope, factor, radius = self.rows.slope, weight**2 * self.rows.factor, self",
        "λ counts twice",
        "reference",
    ),
    Fault(
        "loss-scale-left-out",
        "algorithm.py",
        "regularized = penalty.added_to(gradient, loss.scale, weight, loss.class_dim)",
        "regularized = penalty.added_to(gradient, 1.0, weight, loss.class_dim)",
        "a scaled loss has an unscaled penalty",
        "loss_reader",
    ),
    Fault(
        "loss-scale-squared",
        "algorithm.py",
        "regularized = penalty.added_to(gradient, loss.scale, weight, loss.class_dim)",
        "regularized = penalty.added_to(gradient, loss.scale * loss.scale, weight, loss.class_dim)",
        "the penalty carries the loss's factor twice",
        "loss_reader",
    ),
    Fault(
        "weight-of-the-last-step",
        "algorithm.py",
        "weight = self.weight(self.steps + 1) if",
        "weight = self.weight(self.steps) if",
        "λ's schedule is a step late",
        "settings optimizer",
    ),
    Fault(
        "penalty-added-twice",
        "algorithm.py",
        "not self.hooks.attached or forward.added_in == backward:",
        "not self.hooks.attached:",
        "logits that were converted get the penalty at both places",
        "dcp algorithm",
    ),
    Fault(
        "attack-gets-the-penalty",
        "algorithm.py",
        "if not (fills_all_leaves() or reaches_parameters(forward.nodes, self._base)):",
        "if False:",
        "a backward pass for the gradient of the inputs carries the penalty",
        "algorithm",
    ),
    Fault(
        "learned-at-every-backward",
        "algorithm.py",
        "first, forward.counted = batches.observing and not forward.counted, True",
        "first, forward.counted = batches.observing, True",
        "two backward passes of one forward pass teach the forecaster twice",
        "batches algorithm",
    ),
    Fault(
        "penalty-in-half-precision",
        "forecaster.py",
        "        out = None if gradient.dtype == slope.dtype else torch.empty_like(gradient)\n",
        "        slope, factor, out = (slope * factor).to(gradient.dtype), 1.0, None\n",
        "the penalty's gradient underflows in float16, before it is multiplied by the loss scale",
        "amp",
    ),
    # ---- which forward and backward passes count ---------------------------------------------------------------------
    Fault(
        "evaluation-counted",
        "algorithm.py",
        "if not (module.training or self._count_eval) or not torch.is_grad_enabled() or is_recorded():",
        "if not torch.is_grad_enabled() or is_recorded():",
        "forward passes in evaluation mode are regularized",
        "algorithm",
    ),
    Fault(
        "recomputation-counted",
        "algorithm.py",
        "if trained is None or (backward != -1 and backward == self.batches.backward):",
        "if trained is None:",
        "a checkpoint's recomputation is a forward pass of its own",
        "checkpointing batches",
    ),
    Fault(
        "gone-batch-counted",
        "batches.py",
        "if not self.count or not self.observing or self.backward == backward:",
        "if True:",
        "a batch whose step a gradient scaler skipped is learned from",
        "batches",
    ),
    Fault(
        "cleared-by-the-model",
        "batches.py",
        "return self.cleared or not self.have_gradients()",
        "return self.cleared",
        "a batch is not gone if the model's zero_grad has cleared its gradients",
        "batches",
    ),
    Fault(
        "cleared-before-step",
        "optimizer.py",
        "        if batches.were_cleared():\n            algorithm.forget()\n        elif not",
        "        if not",
        "the companion learns from a batch whose gradients were cleared",
        "batches",
    ),
    Fault(
        "not-finite-batch-learned",
        "loss/reader.py",
        "says = math.isfinite(total) and not (",
        "says = not (",
        "the forecaster learns from logits that are not finite",
        "algorithm_not_finite",
    ),
    Fault(
        "not-finite-batch-learned-by-given-scale",
        "loss/reader.py",
        "finite = not may_sync or math.isfinite(gradient.sum())",
        "finite = True",
        "the same with a loss scale that is given, where nothing else looks at the gradient",
        "algorithm_not_finite",
    ),
    Fault(
        "not-finite-unsaid",
        "algorithm.py",
        "if self.batches.not_finite and not self._warned_not_finite:",
        "if False:",
        "no warning that batches are left out",
        "algorithm_not_finite",
    ),
    Fault(
        "strict-check-gone",
        "optimizer.py",
        "if batches.count or not batches.have_gradients() or not (self._strict and self._algorithm.hooks.attached):",
        "if True:",
        "a step without a training forward pass passes silently",
        "algorithm optimizer",
    ),
    # ---- the step: order, closures, errors ---------------------------------------------------------------------------
    Fault(
        "companion-steps-first",
        "optimizer.py",
        "            result = self.base.step()  # θ, by the gradients of Equation 2\n"
        "            self.forecaster.step()  # ω, by those of Equation 4, or the prototypes\n",
        "            self.forecaster.step()\n            result = self.base.step()\n",
        "the companion has stepped if the base's step raises",
        "batches",
    ),
    Fault(
        "companion-backward-in-step",
        "companion/companion.py",
        "        if current_backward() != -1:\n"
        "            call_after_backward(self._run_backward)  # the model's activations are freed by then\n",
        "",
        "the companion's backward pass waits for the step, which inputs refilled before it change",
        "companion batches",
    ),
    Fault(
        "closure-called-twice",
        "optimizer.py",
        "        loss = closure()\n",
        "        closure()\n        loss = closure()\n",
        "gradients of a closure pile up",
        "optimizer zero_weight",
    ),
    Fault(
        "learned-at-every-evaluation",
        "optimizer.py",
        "                self.forecaster.before_step()\n                batches.observing = False\n",
        "                self.forecaster.before_step()\n",
        "LBFGS's later evaluations teach the companion too",
        "zero_weight dcp",
    ),
    # ---- the wrapper -------------------------------------------------------------------------------------------------
    Fault(
        "groups-copied",
        "_wrapper.py",
        "lambda self: getattr(self.base, name),",
        "lambda self: type(getattr(self.base, name))(getattr(self.base, name)),",
        "param_groups and state are copies of the base's",
        "wrapper",
    ),
    Fault(
        "zero-grad-keeps-tensors",
        "optimizer.py",
        "self.base.zero_grad(set_to_none)",
        "self.base.zero_grad()",
        "set_to_none=False is ignored",
        "wrapper",
    ),
    Fault(
        "added-group-not-followed",
        "optimizer.py",
        '            self.forecaster.follow("added")\n',
        "            pass\n",
        "the companion does not train a group that was added",
        "companion_follow structure",
    ),
    Fault(
        "mode-not-followed",
        "optimizer.py",
        "        self.forecaster.follow(mode)\n",
        "",
        "the companion's optimizer stays in train mode (Schedule-Free)",
        "wrapper",
    ),
    Fault(
        "half-loaded",
        "_wrapper.py",
        "with all_or_nothing(self.base):",
        "if True:",
        "a state that cannot be loaded has changed the base",
        "resume",
    ),
    Fault(
        "superseded-goes-on",
        "_hooks.py",
        "                    listener.replaced()\n",
        "                    pass\n",
        "a model that was wrapped again is regularized twice",
        "copies",
    ),
    Fault(
        "hooks-left",
        "algorithm.py",
        "        self.hooks.remove()\n        self.superseded = False\n",
        "        self.superseded = False\n",
        "detach leaves the hooks on the model",
        "copies",
    ),
    # ---- checkpoints -------------------------------------------------------------------------------------------------
    Fault(
        "steps-not-saved",
        "optimizer.py",
        'state = {"steps": algorithm.steps,',
        'state = {"steps": 0,',
        "a resumed run begins the schedules anew",
        "resume",
    ),
    Fault(
        "class-dim-not-saved",
        "loss/reader.py",
        '"class_dim": self.class_dim}',
        '"class_dim": None}',
        "a resumed run looks for the class dimension anew",
        "loss_reader",
    ),
    Fault(
        "form-not-saved",
        "loss/reader.py",
        'return {"form": form, "scale": ',
        'return {"form": None, "scale": ',
        "a resumed run reads its first batch as another form, if the batch does not tell",
        "loss_reader",
    ),
    Fault(
        "scale-not-saved",
        "loss/reader.py",
        '"scale": None if scale is None else float(scale)',
        '"scale": None',
        "after resuming, a batch whose factor cannot be read gets the factor 1",
        "loss_reader",
    ),
    Fault(
        "companion-optimizer-not-loaded",
        "companion/companion.py",
        '            network.optimizer.load_state_dict(state["optimizer"])\n',
        "",
        "a resumed companion has no momentum",
        "resume",
    ),
    Fault(
        "scheduler-not-saved",
        "companion/companion.py",
        "        network.optimizer.follow_options()  # what the script has changed since",
        "        # what the script has changed since",
        "a state that is saved after a scheduler's step has the former learning rate",
        "resume",
    ),
    Fault(
        "seen-not-saved",
        "prototypes.py",
        '"numbers": self._numbers[:-1].clone()}',
        '"numbers": torch.ones_like(self._numbers[:-1])}',
        "after resuming, classes not yet seen have a prototype of zero",
        "prototypes",
    ),
    # ---- distances and the companion's target ------------------------------------------------------------------------
    Fault(
        "alpha-turned-round",
        "distances.py",
        "return found._replace(factor=-share * found.factor, radius",
        "return found._replace(factor=-alpha * found.factor, radius",
        "mse: the companion moves by α and not 1 - α",
        "reference",
    ),
    Fault(
        "alpha-turned-round-in-target",
        "distances.py",
        "torch.lerp(c, z, 1.0 - alpha)",
        "torch.lerp(c, z, alpha)",
        "other distances: the target is (1 - α) c + α z",
        "reference",
    ),
    Fault(
        "kl-direction",
        "distances.py",
        "    log_p = F.log_softmax(c / temperature, dim=1)\n    log_q = F.log_softmax(z / temperature, dim=1)\n",
        "    log_p = F.log_softmax(z / temperature, dim=1)\n    log_q = F.log_softmax(c / temperature, dim=1)\n",
        "KL(z || c) for KL(c || z)",
        "distances",
    ),
    Fault(
        "kl-temperature-squared",
        "distances.py",
        "masked_fill(log_p == -torch.inf, 0.0)).sum() / len(z)",
        "masked_fill(log_p == -torch.inf, 0.0)).sum() * temperature**2 / len(z)",
        "kl has distillation's factor T²",
        "distances",
    ),
    Fault(
        "kl-slope",
        "distances.py",
        "difference(log_q.exp_(), p), 1.0 / self.temperature)",
        "difference(log_q.exp_(), p), 1.0)",
        "kl's gradient is that of logits that were not divided by T",
        "distances",
    ),
    Fault(
        "infonce-direction",
        "distances.py",
        "return F.cross_entropy(similarity, torch",
        "return F.cross_entropy(similarity.T, torch",
        "rows of c look for rows of z",
        "distances",
    ),
    Fault(
        "masked-classes-counted",
        "distances.py",
        "return found.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)",
        "return found",
        "classes of minus infinity on both sides make the penalty nan",
        "distances algorithm_not_finite",
    ),
    # ---- λ and α over time -------------------------------------------------------------------------------------------
    Fault(
        "warmup-late",
        "schedules.py",
        "return self.value * min(1.0, step / self.steps)",
        "return self.value * min(1.0, (step - 1) / self.steps)",
        "the warmup is a step late",
        "schedules",
    ),
    # ---- the companion -----------------------------------------------------------------------------------------------
    Fault(
        "stale-prediction",
        "companion/companion.py",
        "        prediction.rows = c = to_rows(prediction.logits.detach(), loss.class_dim).to(z.device)\n",
        '        former = getattr(self, "_former", prediction.logits).detach()\n'
        "        self._former = prediction.logits\n"
        "        prediction.rows = c = to_rows(former, loss.class_dim).to(z.device)\n",
        "the model is held to the prediction for the batch before",
        "reference",
    ),
    Fault(
        "draws-not-replayed",
        "companion/companion.py",
        "with replayed(rng_state), inputs.outside_checkpoints(), torch.set_grad_enabled(self._learns):",
        "with inputs.outside_checkpoints(), torch.set_grad_enabled(self._learns):",
        "the companion has dropout masks of its own",
        "companion",
    ),
    Fault(
        "generator-not-put-back",
        "_rng.py",
        "        restore(now)\n",
        "        pass\n",
        "the script's random stream is the companion's",
        "companion",
    ),
    Fault(
        "companion-gradients-pile-up",
        "companion/companion.py",
        '            deque(map(setattr, network.follower.parameters, repeat("grad"), repeat(None)), maxlen=0)\n',
        "",
        "the companion learns from former batches again",
        "reference",
    ),
    Fault(
        "every-off-by-one",
        "companion/companion.py",
        "self._learns, self._step = step % self._options.every == 0, step",
        "self._learns, self._step = (step - 1) % self._options.every == 0, step",
        "with companion_every=k the companion learns at the first of k steps",
        "companion_costs",
    ),
    Fault(
        "sum-for-mean",
        "companion/weighting.py",
        "if gradients and (self.count > 1 or self.half):",
        "if gradients and self.half:",
        "the companion learns from the sum of a step's forward passes",
        "companion_weighting",
    ),
    Fault(
        "overflow-stepped-on",
        "companion/weighting.py",
        "return self.half and not bool(",
        "return False and not bool(",
        "the companion steps on gradients that overflowed in float16",
        "companion_weighting",
    ),
    Fault(
        "frozen-not-shared",
        "companion/copying.py",
        "[p for p in model.parameters() if not p.requires_grad]",
        "[]",
        "the companion has frozen parameters of its own",
        "companion_follow",
    ),
    Fault(
        "written-parameter-shared",
        "companion/companion.py",
        "            network.follower.require_unwritten(network.versions)\n",
        "            pass\n",
        "both networks write to the frozen parameters (a queue, a moving average) that they share",
        "companion_follow",
    ),
    Fault(
        "mode-not-mirrored",
        "companion/follow.py",
        "                ours.training = theirs.training\n",
        "                pass\n",
        "the companion's layers stay in the mode that they were copied in",
        "companion_follow",
    ),
    Fault(
        "options-not-followed",
        "companion/optimizer.py",
        "                    _put(ours, key, _option(key, value, self._lr_scale))\n",
        "                    pass\n",
        "a scheduler does not reach the companion's optimizer",
        "schedulers",
    ),
    Fault(
        "counts-followed",
        "companion/optimizer.py",
        "if key not in NO_OPTIONS and not (key in seen and _is_same(value, seen[key], versions.get(key, 0))):",
        "if key not in NO_OPTIONS:",
        "what the base counts in its groups overwrites the companion's",
        "companion_optimizer",
    ),
    Fault(
        "companion-optimizer-draws",
        "companion/optimizer.py",
        "                _rng.restore(state)\n",
        "                pass\n",
        "an optimizer that draws (for the companion) changes the script's random stream",
        "zero_weight",
    ),
    Fault(
        "inputs-not-detached",
        "companion/inputs.py",
        "return tensor.detach().requires_grad_() if tensor.requires_grad else tensor",
        "return tensor",
        "the companion's backward pass goes on into what made the inputs",
        "companion_inputs",
    ),
    Fault(
        "first-prediction-unchecked",
        "companion/companion.py",
        "            copying.require_equal(forward.logits, logits.detach(), network.module)",
        "            pass",
        "no warning that the copy is another network",
        "companion_copying",
    ),
    Fault(
        "loaded-weights-unsaid",
        "companion/companion.py",
        "            warn(WEIGHTS_LOADED)\n",
        "            pass\n",
        "no warning that the companion does not have weights loaded in the run",
        "companion",
    ),
    Fault(
        "lost-companion-kept",
        "companion/companion.py",
        "        if self._diverged:\n            self._recreate()\n",
        "",
        "a companion whose logits are not finite stays",
        "companion_not_finite",
    ),
    # ---- the weight --------------------------------------------------------------------------------------------------
    Fault(
        "skipped-steps-counted",
        "weights.py",
        '        """The step of the batches that are pending was skipped."""\n        self._pending = []\n',
        '        """The step of the batches that are pending was skipped."""\n',
        "the training accuracy counts batches whose step was skipped",
        "weights",
    ),
    Fault(
        "accuracy-not-saved",
        "weights.py",
        'return {"accuracy": self.accuracy}',
        'return {"accuracy": 0.0}',
        "a resumed run begins with the least weight",
        "weights",
    ),
    # ---- the prototypes ----------------------------------------------------------------------------------------------
    Fault(
        "rows-of-absent-classes-forgotten",
        "prototypes.py",
        "torch.where(counts > SOME_ROWS, numbers, self._numbers, out=self._numbers)",
        "self._numbers.copy_(numbers)",
        "a class that is absent from many batches forgets its rows",
        "weights prototypes",
    ),
    Fault(
        "first-mean-shrunk",
        "prototypes.py",
        "divisors = torch.where(self._numbers > SOME_ROWS, counts if rate else torch.inf, counts * (rate or 1.0))",
        "divisors = counts",
        "the first mean does not become the prototype but a part of it",
        "prototypes reference",
    ),
    Fault(
        "unseen-prototypes-pull",
        "prototypes.py",
        "weights = None if self._all_known else self._known().index_select(0, labels)",
        "weights = None",
        "rows of a class not yet seen are held to a prototype of zero",
        "prototypes",
    ),
    Fault(
        "rows-without-label-pull",
        "prototypes.py",
        "self._rows[num_classes:] = torch.nan",
        "self._rows[num_classes:] = 0.0",
        "rows without a label are held to a prototype of zero",
        "loss_reader",
    ),
    Fault(
        "ignored-rows-in-the-mean",
        "prototypes.py",
        "        return labels, (labels < self.num_classes).sum(dtype=z.dtype).clamp(min=1)\n",
        "        return labels, max(len(labels), 1)\n",
        "with given labels the penalty's mean counts rows that are ignored",
        "prototypes dcp",
    ),
    Fault(
        "mixture-of-unseen",
        "prototypes.py",
        "unknown = ((shares > 0) & (self._known().index_select(0, classes) == 0)).any(1)",
        "unknown = ((shares > 0) & (self._known().index_select(0, classes) == 0)).all(1)",
        "soft labels are held to classes not yet seen",
        "prototypes dcp",
    ),
    # ---- labels, loss scale, class dimension -------------------------------------------------------------------------
    Fault(
        "given-labels-kept",
        "loss/reader.py",
        "self.ahead = None if following is None else (None, following)",
        "self.ahead = following, following",
        "labels of one forward pass are taken for the next one's",
        "loss_reader",
    ),
    Fault(
        "all-rows-counted",
        "loss/reader.py",
        "self.count = torch.linalg.vector_norm(self.size, 0,",
        "self.count = torch.linalg.vector_norm(torch.ones_like(self.size), 0,",
        "the loss scale and the penalty's mean count rows that the loss ignores",
        "loss_reader prototypes",
    ),
    Fault(
        "zero-gradient-has-a-factor",
        "loss/reader.py",
        "        if total == 0:\n            scale = 0.0\n        elif scale is None:\n",
        "        if scale is None:\n",
        "a batch whose loss was multiplied by 0 gets a penalty with the last factor, or with 1",
        "loss_reader",
    ),
    Fault(
        "zero-gradient-has-a-factor-unread",
        "loss/reader.py",
        "                scale = scale * (count > 0)  # a gradient of zero",
        "                pass  # a gradient of zero",
        "the same on an accelerator, where no value is read",
        "loss_reader",
    ),
    Fault(
        "last-scale-not-kept",
        "loss/reader.py",
        "        self._scale = self._latest\n",
        "        pass\n",
        "a batch whose factor cannot be read gets the factor 1",
        "loss_reader",
    ),
    Fault(
        "smoothing-ignored",
        "loss/cross_entropy.py",
        "p, smoothing = torch.softmax(z, 1), form.smoothing",
        "p, smoothing = torch.softmax(z, 1), 0.0",
        "hard labels with label smoothing are not read",
        "loss_cross_entropy",
    ),
    Fault(
        "smoothed-label-is-lowest",
        "loss/cross_entropy.py",
        "y = torch.addcmul(g, p, guess, value=-0.5).argmin(1)",
        "y = g.argmin(1)",
        "with label smoothing rows that are too sure of their label get another one",
        "loss_cross_entropy",
    ),
    Fault(
        "floor-kept",
        "loss/cross_entropy.py",
        "shares = torch.addcdiv(p, g, slope, value=-1.0).sub_(smoothing / classes).div_(1.0 - smoothing)",
        "shares = torch.addcdiv(p, g, slope, value=-1.0)",
        "soft labels have a share in every class where the loss smooths mixed labels",
        "loss_cross_entropy",
    ),
    Fault(
        "labels-of-few-rows",
        "loss/cross_entropy.py",
        "READ_SHARE = 0.75",
        "READ_SHARE = 0.1",
        "another loss passes for a cross-entropy where a few rows fit",
        "loss_cross_entropy",
    ),
    Fault(
        "two-classes-ambiguous",
        "loss/cross_entropy.py",
        "    if z.shape[1] == 2:\n        told = told &",
        "    if False:\n        told = told &",
        "mixed labels and focal losses of two classes pass for weighted hard labels",
        "loss_cross_entropy",
    ),
    Fault(
        "class-dim-not-laid-out",
        "loss/reader.py",
        "z, g = to_rows(z, dim), to_rows(g, dim)",
        "z, g = to_rows(z, 1), to_rows(g, 1)",
        "dense logits have dimension 1 for classes, whichever was found",
        "loss_reader",
    ),
    Fault(
        "class-dim-first",
        "loss/reader.py",
        "for d in range(1, gradient.ndim) if",
        "for d in range(1, 2) if",
        "the class dimension is always taken for 1",
        "loss_reader",
    ),
    # ---- when values may be read -------------------------------------------------------------------------------------
    Fault(
        "device-always-read",
        "_sync.py",
        "return tensor.is_cpu or is_sync_step(step)",
        "return True",
        "every step waits for the accelerator",
        "device_kernels",
    ),
    Fault(
        "values-never-read",
        "_sync.py",
        "return tensor.is_cpu or is_sync_step(step)",
        "return False",
        "a batch of another form, a lost companion and labels out of range are not found",
        "companion_not_finite loss_reader",
    ),
    # ---- several ranks -----------------------------------------------------------------------------------------------
    Fault(
        "companion-not-averaged",
        "companion/companion.py",
        "self.group.average([*gradients, diverged])",
        "self.group.average([diverged])",
        "each rank's companion learns from its own batch",
        "distributed",
    ),
    Fault(
        "ranks-summed",
        "distributed.py",
        "_torch.unflattened(flat.div_(self.size), together)",
        "_torch.unflattened(flat, together)",
        "the companion learns from the sum over the ranks",
        "distributed",
    ),
    Fault(
        "unused-parameters",
        "companion/companion.py",
        "        if self.group.size > 1:  # every rank must bring the same tensors to the reduction\n"
        "            optimizer.fill_gradients()\n",
        "",
        "ranks that use other layers reduce other tensors",
        "distributed",
    ),
    Fault(
        "buffers-not-synced",
        "companion/follow.py",
        "        self._group.broadcast(self._companion.buffers())\n",
        "",
        "the companions' batch norm differs between ranks",
        "distributed",
    ),
    Fault(
        "weights-not-synced",
        "companion/follow.py",
        "        self._group.broadcast(p.data for p in self._companion.parameters() if p.requires_grad)\n",
        "",
        "the companions' weights differ between ranks",
        "distributed",
    ),
    Fault(
        "prototype-counts-not-added",
        "prototypes.py",
        "            self.group.all_reduce_sum(counts[:-1])\n",
        "",
        "class means divide by one rank's rows",
        "prototypes",
    ),
    Fault(
        "rank-left-waiting",
        "companion/companion.py",
        "            self._mean.count += 1\n",
        "            pass\n",
        "a rank whose batch is not finite leaves the others waiting for its companion's gradients",
        "companion_not_finite",
    ),
    Fault(
        "rank-left-waiting-by-prototypes",
        "prototypes.py",
        "if self._counts is None and self.group.size > 1:  # the others wait",
        "if False:  # the others wait",
        "a rank whose batch is not finite leaves the others waiting for its class sums",
        "prototypes",
    ),
    # ---- metrics, plots, demo ----------------------------------------------------------------------------------------
    Fault(
        "perplexity-base",
        "metrics/non_targets.py",
        ".sum(1).exp(), counts)",
        ".sum(1).exp2(), counts)",
        "the perplexity has base 2 in one place and e in the other",
        "metrics",
    ),
    Fault(
        "drift-unweighted",
        "metrics/streaming.py",
        "distances=mean * samples",
        "distances=mean",
        "batches of a stream are added up without their sizes",
        "metrics_streaming",
    ),
    Fault(
        "band-is-deviation",
        "plots/curves.py",
        "statistics.stdev(c) / math.sqrt(len(c))",
        "statistics.stdev(c)",
        "the band is the standard deviation",
        "plots",
    ),
    Fault(
        "best-epoch-reported",
        "demo/report.py",
        '100 * run["accuracy"][-1]',
        '100 * max(run["accuracy"])',
        "the demo reports the best epoch by the test images",
        "demo",
    ),
    Fault(
        "degrees-of-freedom",
        "demo/report.py",
        "stdtr(runs - 1, ",
        "stdtr(runs + 1, ",
        "the demo's t-test has too many degrees of freedom",
        "demo",
    ),
]


def copied(root: Path, folder: Path) -> Path:
    """Copy a working tree, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=root, text=True).split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def failing_test(tree: Path, *arguments: str) -> str | None:
    """Run pytest up to the first test that fails, and give it; None if all pass.

    A test that hangs is red in CI, too, and is given as one: pytest, which prints a line for each, has been silent for
    long. The whole run may take any time, since the machine may be busy.

    Raises:
        RuntimeError: pytest itself did not get as far.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}  # a fault of the same length and second would pass for compiled
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*PYTEST, *arguments], cwd=tree, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        size, since = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - since < HANGS_AFTER:
            time.sleep(0.2)
            if os.fstat(log.fileno()).st_size > size:
                size, since = os.fstat(log.fileno()).st_size, time.monotonic()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it has started
        status = process.wait()
        log.seek(0)
        output = log.read()
    if status == 0:
        return None
    if status == -signal.SIGKILL:
        return f"{(re.findall(r'[^ ]+::[^ ]+', output) or ['pytest'])[-1]}{HANGS}"
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if status not in (1, 2) or found is None:  # a test failed, or a file could not be imported
        raise RuntimeError(f"pytest {' '.join(arguments)} in {tree} ended with {status}:\n{output}")
    return found[1]


def caught_by(fault: Fault, tree: Path) -> str | None:
    """Make the fault in a tree, and undo it again; give the test that fails."""
    file = tree / "dcl_optim" / fault.file
    former = file.read_text(encoding="utf-8")
    file.write_text(fault.made_in(tree), encoding="utf-8")
    try:
        has_markers = "stress:" in (tree / "pyproject.toml").read_text(encoding="utf-8")  # not an early --root
        files = [*fault.paths, "-m", DEFAULT] if has_markers else fault.paths
        return failing_test(tree, *files) or failing_test(tree, "-n", "2")
    finally:
        file.write_text(former, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of faults, or parts of them; all without")
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="faults at once, each in a copy of its own")
    parser.add_argument("--root", type=Path, default=HERE, help="another working tree, with the same faults to make")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if not args.names or any(name in fault.name for name in args.names)]
    if not chosen:
        parser.error(f"no fault has a name like {' or '.join(args.names)}")
    if args.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.effect} ({fault.file})")
        return 0
    for fault in chosen:
        fault.made_in(args.root)  # all texts are there, before the first is run
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            trees.put(copied(args.root, Path(folder, str(number))))

        def run(fault: Fault) -> str | None:
            tree, start = trees.get(), time.monotonic()
            try:
                found = caught_by(fault, tree)
            finally:
                trees.put(tree)
            print(f"{fault.name}: {found or 'NOT CAUGHT'} ({time.monotonic() - start:.0f} s)", flush=True)
            return found

        with ThreadPoolExecutor(args.jobs) as pool:
            caught = [found for found in pool.map(run, chosen) if found]
        tests = sorted({found.removesuffix(HANGS) for found in caught})
        red = failing_test(trees.get(), *tests) if tests else None
    if red:
        print(f"{red} fails without a fault, too")
    print(f"{len(caught)} of {len(chosen)} faults caught")
    return 0 if len(caught) == len(chosen) and not red else 1


if __name__ == "__main__":
    sys.exit(main())
