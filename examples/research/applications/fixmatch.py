"""FixMatch (Sohn et al., NeurIPS 2020): its loss, its learning rate, its labels, its weak and strong views."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.research.augmentations import Cutout, batch_crop, seeded
from examples.research.datasets import Data
from examples.research.datasets.splits import stratified

MAGNITUDES = 31  # the strengths that torchvision's RandAugment knows


def fixmatch_loss(
    labelled: Tensor, y: Tensor, weak: Tensor, strong: Tensor, threshold: float, weight: float
) -> tuple[Tensor, Tensor]:
    r"""Give the loss (the paper's Equations 3 and 4), and the share of unlabelled images that count in it.

    .. math:: \frac{1}{B} \sum_b \text{CE}(z_b, y_b)
        + \lambda_u \frac{1}{\mu B} \sum_b 1[\max q_b \ge \tau]\, \text{CE}(s_b, \arg\max q_b)

    q is the softmax of the weak views' logits and gets no gradient; s are the strong views' logits. The second mean is
    over all unlabelled images, those below the threshold included.

    Args:
        labelled: logits z of the labelled images' weak views, (B, K).
        y: their labels.
        weak: logits of the unlabelled images' weak views, (μB, K).
        strong: logits s of the same images' strong views, (μB, K).
        threshold: τ.
        weight: λ_u.
    """
    confidence, pseudo_labels = torch.softmax(weak.detach(), dim=1).max(dim=1)
    counted = confidence >= threshold
    unlabelled = (F.cross_entropy(strong, pseudo_labels, reduction="none") * counted).mean()
    return F.cross_entropy(labelled, y) + weight * unlabelled, counted.float().mean()


def cosine(step: int, steps: int) -> float:
    r"""Give the factor on the learning rate after k of K steps, :math:`\cos(7 \pi k / 16 K)` ."""
    return math.cos(7 * math.pi * step / (16 * steps))


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


class Views:
    """The training images of a data set that fits into memory, and two ways to distort them.

    Weak: a crop shifted by up to an eighth of the side, with a black border, mirrored half of the time. Strong: the
    same, then two random operations of RandAugment, each of a random strength, then Cutout of half the side.

    Args:
        data: whose training part is taken.
        mirror: whether a mirrored image still shows its class.
        together: how many neighbours in a batch share their two operations. torchvision applies an operation to many
            images in about the time that it takes for one.

    Raises:
        ValueError: ``together`` is below 1.
        ImportError: torchvision is missing.
    """

    def __init__(self, data: Data, mirror: bool, together: int) -> None:
        if together < 1:
            raise ValueError(f"together={together} must be at least 1: the images that share a strong distortion")
        parts = list(data.fixed("train"))
        x, self.labels = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        # RandAugment takes bytes: undo the normalisation, whose ends are each channel's black and white.
        self._black, white = x.amin((0, 2, 3), keepdim=True), x.amax((0, 2, 3), keepdim=True)
        self._level = (white - self._black) / 255
        self.pictures = ((x - self._black) / self._level).round().to(torch.uint8)
        self._mirror, self._together, side = mirror, together, min(data.shape[1:])
        self._padding, self._cutout, self._operations = side // 8, Cutout(side // 2), _operations()

    def weak(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Weak views of the images of these numbers, normalised as the data set is."""
        return self._normalised(self._shifted(index, generator))

    def strong(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Strong views of them."""
        seed = int(torch.randint(2**62, (), generator=generator))
        return seeded(self._distorted, self._shifted(index, generator), seed)

    def _shifted(self, index: Tensor, generator: torch.Generator) -> Tensor:
        return batch_crop(self.pictures[index], generator, self._mirror, self._padding)

    def _distorted(self, x: Tensor) -> Tensor:
        x = torch.cat([self._operations(neighbours) for neighbours in x.split(self._together)])
        return torch.stack([self._cutout(picture) for picture in self._normalised(x)])

    def _normalised(self, x: Tensor) -> Tensor:
        return x * self._level + self._black


def _operations() -> torch.nn.Module:
    """Two operations of RandAugment, each of its own random strength, as FixMatch has it."""
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise ImportError("the strong views need torchvision: pip install torchvision") from error
    strengths = [v2.RandAugment(num_ops=1, magnitude=magnitude) for magnitude in range(MAGNITUDES)]
    made: torch.nn.Module = v2.Compose([v2.RandomChoice(strengths), v2.RandomChoice(strengths)])
    return made
