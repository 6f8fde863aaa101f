"""The texts of guards.py, whose questions can be read in one go without them."""

from __future__ import annotations

from dcl_optim.progress import Stage

TERMS = {False: "loss + optimizer.penalty(logits)", True: "loss + optimizer.penalty(logits, labels)"}

NOT_FINITE = (
    "non-finite logits or loss: a batch whose logits or whose gradient of them is not finite gets no penalty, and "
    "neither the companion nor the prototypes learn from it.\n  Fix: if weights are not finite, training has diverged: "
    "lower the learning rate. One NaN in an input makes all weights NaN, also without the wrapper: leave it out.\n"
    "  Logits of rows without a label may be nan: leave these rows out, as in optimizer.penalty(z[keep], y[keep])"
)
NOT_KEPT = (
    "the model is trained, but the DCPOptimizer or DCLOptimizer around its optimizer is gone, since no variable holds "
    "it: there is no penalty.\n"
    "  Fix: optimizer = DCPOptimizer(optimizer, model), and step it. If no penalty is meant, call its detach()"
)
NO_GRADIENTS = (
    "step found no gradients of the parameters that the optimizer has: nothing is trained.\n"
    "  Fix: wrap the model that is called, with an optimizer of its parameters: one that was built again, or a copy, "
    "has others. Call zero_grad before the backward pass, or after the step"
)
REPLICATED = (
    "model was wrapped by nn.DataParallel after it was given to the optimizer, whose hooks then run once for each part "
    "of the batch.\n  Fix: wrap the optimizer with nn.DataParallel(model)"
)
ONCE = (
    "{}.penalty is differentiable once, and this backward pass keeps a graph of the gradient (create_graph=True): its "
    "second derivative would be missing.\n  Fix: take that gradient of the loss without the penalty"
)
STALE = (
    "a backward pass came through logits, or through what penalty returned, of before the last step of {}, or "
    "before a state was loaded: their penalty is that of other weights.\n"
    "  Fix: call the model in each step, and penalty if the script adds it"
)
CHANGED = (
    "the weights were changed twice without a step of {name}: the base {base} was stepped, or another optimizer, or a "
    "method wrote to them. Prototypes and companion learn nothing so.\n"
    "  Fix: call step() of the wrapper, with SAM step(closure); detach() before another optimizer; where weights are "
    "changed and restored (FGM, Embedding(max_norm=)), strict=False. See docs/get-started.md"
)
SUPERSEDED = (
    "another optimizer has wrapped the model since this {} did: step that one, or call detach() on this one to go on "
    "with its base optimizer alone"
)
DETACHED = (
    "{}.penalty was called after detach(), which has ended the method: further steps are those of the base alone.\n"
    "  Fix: leave the term out, or wrap the base optimizer again"
)
NOT_REGULARIZED = (
    "{}.step found gradients, but no backward through a training forward of the wrapped model since the last step.\n"
    "  Seen: {}.\n  Fix: {}. strict=False allows such steps. See docs/troubleshooting.md"
)
OF_AN_ENGINE = (
    "{}.step found gradients, but no training forward pass of the model since the last step, and parameters that an "
    "engine (DeepSpeed) has put in place of the model's.\n"
    "  Fix: call the engine in training mode in each step, z = engine(x), and add the penalty to the loss, {}"
)
EVAL_MODE = "the model is in eval mode", f"call model.train(); to train in eval mode use DCP with {TERMS[True]}"
SEEN_AND_FIX = {
    Stage.NOTHING: (
        "no training forward pass of the model: step was called twice, or another method, a part or a copy of it was "
        "called, or it was compiled and called before it was wrapped",
        "call step once after each backward pass, and the model itself before it, as model(x); or wrap the module that "
        "is called; or with DCP add the penalty to the loss, {}",
    ),
    Stage.FORWARD: (
        "the gradient did not come through the logits that were found (others, or these detached), or no backward pass "
        "ran",
        "pass logits=<their function>, or add the penalty to the loss, {}",
    ),
    Stage.GRAPH_KEPT: ("a backward pass with create_graph=True", "run a backward pass without it before the step"),
}
NOT_ADDED = (
    "{}.penalty was called since the last step, but what it returned took part in no backward pass that goes on to the "
    "parameters.\n"
    "  Fix: add it to the loss, loss = loss + optimizer.penalty(...), before loss.backward(), outside of fused losses, "
    "which take gradients in their forward pass. To look at the value use logs(). strict=False allows such steps"
)
WITHOUT_TERM = (
    "a step without a penalty: the script has called {}.penalty in other steps, and then nothing else adds one. "
    "Such steps are counted as skipped in logs().\n  Fix: add it to the loss of each step, if it is meant there too"
)
LINE_BEFORE_TERM = (
    "{}.penalty is called for the first time after gradients of the loss had the penalty without it, and prototypes or "
    "companion have learned from these batches.\n"
    "  Fix: for a penalty from a step on call it in each step, and pass weight=lambda step: 0.1 * (step > 1000); call "
    "it before the script takes gradients for another purpose"
)
MINIMIZES_A_VALUE = (
    "{} does not regularize LBFGS by the gradient alone, since LBFGS compares values of the loss.\n"
    "  Fix: add the penalty to the loss in the closure, {}"
)


TOO_STRONG = (
    "the penalty of {name} is {penalty:.2g}, which is large beside {guess:.2g}, the cross-entropy of a guess among "
    "{classes} classes: the logits swing about their prototypes, and training may diverge.\n"
    "  Fix: a smaller learning rate, or a smaller weight than {weight:.2g}. See docs/troubleshooting.md"
)
WEIGHTS_LOADED = (
    "weights were loaded into the model since its last step, but what {name} learned from the weights before was kept: "
    "if they are others, the penalty pulls the model back.\n"
    "  Fix: after loading wrap again, optimizer = {name}(optimizer.base, model), or with DCL call "
    "optimizer.reset_companion(); or load the optimizer's state of the same moment. Ignore this for weights swapped in "
    "for an evaluation only"
)
IN_BATCH = (
    "the labels of this batch are its rows' places, 0, 1, 2, ... up to its last logit: scores against the rows of a "
    "batch (in-batch negatives, CLIP) have no classes.\n"
    "  Fix: use DCLOptimizer (no gain was measured for such losses). If these are classes, pass num_classes={}"
)
PROBABILITIES = (
    "logits has rows that are probabilities, whose distances are so small that the penalty has hardly any effect.\n"
    "  Fix: pass the logits themselves, before softmax or sigmoid, or their log_softmax. See docs/troubleshooting.md"
)
SOFTMAX_TWICE = (
    "the rows of the model's output are probabilities, and the loss applies softmax to them again.\n"
    "  Fix: remove the softmax layer; F.cross_entropy takes logits. See docs/troubleshooting.md"
)
WRITES_INTO_ITS_INPUT = (
    "the model's forward writes its logits into an object inside of its input, where the companion has put its own in "
    "their place.\n"
    "  Fix: return a new object from forward, or use DCP"
)
SEVERAL = (
    "the model returned several tensors of the shape of logits, and the first of them gets the penalty.\n"
    "  Fix: say which are the logits, logits=lambda output: output[0], or output[-1] for the last of several exits"
)
NOT_OF_THE_MODEL = (
    "penalty got logits of shape {} that no training forward pass of the wrapped model returned since the last step: "
    "to validate use torch.no_grad(). To train call model.train() before it, and pass the tensor that the model "
    "returned, called as model(x), not in a reentrant checkpoint (pass use_reentrant=False). A mean of several calls "
    "belongs inside of the model. Of several tensors say which are the logits, logits=lambda output: output[1]"
)
