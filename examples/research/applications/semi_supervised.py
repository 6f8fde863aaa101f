"""Semi-supervised learning: FixMatch with a few labels, and with Deep Companion Learning on top of it.

The companion needs no labels, so the penalty covers every row of the batch: labelled, weak and strong views. The model
is called on all three together. The loss is a mean over the labelled rows plus one over the unlabelled, from whose
gradient no common factor can be read, so the penalty is a term of it: ``loss + optimizer.penalty(z)``.

Data at hand: 3,000 images of Fashion-MNIST, 40 of them with a label. The paper's Figure 4, on CIFAR-10, is
``python -m examples.paper semi-supervised``. The border of a crop is black, where FixMatch's mirrors the image. Choose
hyperparameters with ``--part validation``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dcl_optim import DCLOptimizer
from examples.research import networks
from examples.research.applications.classification import accuracy, moved, placed
from examples.research.applications.comparison import Application, Row, main
from examples.research.applications.fixmatch import Views, batches, cosine, fixmatch_loss
from examples.research.applications.optimizers import penalty
from examples.research.datasets import AUGMENTATIONS, Data, load
from examples.research.datasets.splits import check_part, stratified
from examples.research.methods.averages import moving_average
from examples.research.methods.base import check_count, check_range

REPORT = 50  # steps


@dataclass(frozen=True)
class Settings:
    """What the command line can change; B, μ, τ and λ_u are FixMatch's names.

    Attributes:
        data: a data set of examples.research that fits into memory.
        folder: of its files; None: where examples.research looks for them.
        train_size: training images without a label, those with one among them; 0: all.
        labels: how many of them have a label.
        network: one of examples.research's.
        steps: K.
        batch_size: B.
        ratio: μ.
        threshold: τ.
        unlabelled_weight: λ_u.
        lr: the first step's learning rate.
        weight_decay: of the kernels.
        average: decay of the weights' moving average, which is evaluated; 0: the last weights.
        together: images that share the operations of a strong view.
        part: test, or validation to choose hyperparameters on.
    """

    data: str = "fashion-mnist"
    folder: str | None = None
    train_size: int = 3000
    labels: int = 40
    network: str = "small-cnn-half"
    steps: int = 1000
    batch_size: int = 16
    ratio: int = 7
    threshold: float = 0.95
    unlabelled_weight: float = 1.0
    lr: float = 0.03
    weight_decay: float = 5e-4
    average: float = 0.0
    together: int = 4
    part: str = "test"

    def __post_init__(self) -> None:
        check_part(self.part)
        check_count("steps", self.steps, 1)
        check_range("average", self.average, 0, 1)


def train(
    *,
    weight: float | None,
    seed: int,
    device: torch.device,
    progress: Callable[[str], None],
    **settings: Any,
) -> float:
    """Train one network; give its accuracy in per cent. ``weight`` is DCL's λ, None to go without DCL."""
    chosen = Settings(**settings)
    data = load(chosen.data, folder=chosen.folder, train_size=chosen.train_size or None, seed=seed)
    stream = training_batches(chosen, data, seed)
    torch.manual_seed(seed)
    model = placed(networks.build(chosen.network, data.classes, data.shape), device)
    deployed = moving_average(model, chosen.average, warm_up=True)
    optimizer: Optimizer = SGD(groups(model, chosen.weight_decay), lr=chosen.lr, momentum=0.9, nesterov=True)
    if weight is not None:
        optimizer = DCLOptimizer(optimizer, model, weight=weight, alpha=0.6)
    scheduler = LambdaLR(optimizer, lambda step: cosine(step, chosen.steps))
    parts = [chosen.batch_size, chosen.ratio * chosen.batch_size, chosen.ratio * chosen.batch_size]
    for step, (x, y) in zip(range(1, chosen.steps + 1), stream, strict=False):
        z = model(moved(x, device))
        known, weak, strong = z.split(parts)
        loss, counted = fixmatch_loss(known, y.to(device), weak, strong, chosen.threshold, chosen.unlabelled_weight)
        optimizer.zero_grad()
        (loss + penalty(optimizer, z)).backward()
        optimizer.step()
        scheduler.step()
        deployed.update_parameters(model)
        if step % REPORT == 0 or step == chosen.steps:
            progress(f"step {step}/{chosen.steps}, loss {loss.item():.3f}, {counted.item():.0%} counted")
    return accuracy(deployed, data.fixed(chosen.part), device)


def training_batches(chosen: Settings, data: Data, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels without end, which depend on the settings and the seed alone."""
    views = Views(data, mirror=AUGMENTATIONS.get(chosen.data, "basic") == "basic", together=chosen.together)
    numbers = labelled(views.labels, chosen.labels, seed)
    return batches(views, numbers, chosen.batch_size, chosen.ratio, torch.Generator().manual_seed(seed))


def labelled(y: Tensor, count: int, seed: int) -> Tensor:
    """The numbers of the images whose labels are used: ``count`` of them, each class in proportion.

    Raises:
        ValueError: there are not so many images, or a class would go without a label.
    """
    chosen = stratified(y, count, seed)
    fewest = int(torch.bincount(y[chosen], minlength=int(y.max()) + 1).min())
    if len(chosen) != count or not fewest:
        raise ValueError(f"labels={count} must be at most the {len(y)} training images, and enough for every class")
    return chosen


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups: FixMatch's weight decay is on kernels alone, not on biases and batch norm."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kernels = [weight for weight in weights if weight.ndim > 1]
    rest = [weight for weight in weights if weight.ndim <= 1]
    return [{"params": kernels, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


APPLICATION = Application(
    name="semi-supervised",
    score="accuracy, %",
    train=train,
    rows={
        "FixMatch": Row({"weight": None}),
        "FixMatch, DCL": Row({"weight": 0.1}, against="FixMatch"),
        "FixMatch, DCL, paper": Row({"weight": 1.0}, against="FixMatch"),
    },
    settings=asdict(Settings()),
    bounds={"train_size": (0,), "threshold": (0, 1), "average": (0, 1)},
)

if __name__ == "__main__":
    main(APPLICATION, __doc__)
