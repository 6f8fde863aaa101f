"""Masked autoencoders pre-trained with and without Deep Companion Learning, fine-tuned on few labels.

    python -m examples.research.applications.masked_autoencoder --seeds 3

He et al., Masked Autoencoders Are Scalable Vision Learners, CVPR 2022: three patches of four are hidden, and the loss
is the mean squared error of the reconstruction on them. With DCL the companion reconstructs the same image from the
same patches, and the two reconstructions, of all patches, are held together (DCL paper, "Self-Supervised Pretraining").
The companion stays behind when the encoder moves on: fine-tuning is the same in all rows, without DCL.

The rows of a seed start from the same weights and see the same images with the same patches hidden; the first one is
fine-tuned without pre-training. By default a small network and Fashion-MNIST, with labels for few of its images.
The paper's Table 4 (ViT-B, ImageNet) is ``python -m examples.paper self-supervised``. Another ``--data`` takes the same
encoders from ``--checkpoints``. He et al. also fine-tune with stochastic depth, mixup, CutMix and RandAugment, which
are not here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.optim import Optimizer
from transformers import ViTForImageClassification, ViTMAEForPreTraining

from dcl_optim import DCLOptimizer
from examples.research import datasets
from examples.research.applications.classification import accuracy
from examples.research.applications.comparison import Application, Row, main
from examples.research.applications.masked_autoencoder.networks import autoencoder, classifier
from examples.research.applications.masked_autoencoder.settings import FineTuning, Pretraining
from examples.research.applications.masked_autoencoder.trainer import Trainer
from examples.research.datasets import Data

WEIGHT_DECAY = 0.05  # He et al., Tables 8 and 9


def pretraining_optimizer(model: nn.Module, setting: Pretraining, method: str) -> Optimizer:
    """AdamW as He et al. have it, and DCL around it."""
    groups = param_groups_weight_decay(model, WEIGHT_DECAY)
    optimizer: Optimizer = torch.optim.AdamW(groups, lr=setting.pretraining_lr, betas=(0.9, 0.95))
    if method == "dcl":
        # The squared distance is the mean over all pixels, whichever dimension is taken for the classes.
        options: dict[str, Any] = {"distance": "squared", "logits": attrgetter("logits")}
        optimizer = DCLOptimizer(optimizer, model, weight=setting.weight, alpha=0.6, **options)
    return optimizer


def fine_tuning_optimizer(model: nn.Module, setting: FineTuning) -> Optimizer:
    """AdamW with a smaller learning rate the nearer a layer is to the pixels."""
    groups = param_groups_layer_decay(model, WEIGHT_DECAY, layer_decay=setting.layer_decay)
    for group in groups:
        group["lr"] = setting.lr * group.pop("lr_scale")
    return torch.optim.AdamW(groups)


def pretrain(
    model: ViTMAEForPreTraining,
    data: Data,
    setting: Pretraining,
    method: str,
    seed: int,
    checkpoint: Path | None,
    progress: Callable[[str], None],
) -> None:
    """Train an autoencoder to its last epoch, from the checkpoint if there is one."""
    device = model.device
    batch_size, epochs = setting.pretraining_batch_size, setting.pretraining_epochs
    trainer = Trainer(model, pretraining_optimizer(model, setting, method), data, batch_size, epochs, seed)
    if checkpoint is not None and checkpoint.exists():
        trainer.resume(checkpoint, setting)
    while len(trainer.losses) < epochs:
        loss = trainer.train_epoch(lambda x, y: {"pixel_values": x.to(device)})
        if checkpoint is not None:
            trainer.save(checkpoint, setting)
        progress(f"pre-training epoch {len(trainer.losses)}, loss {loss:.3f}")


def fine_tune(
    model: ViTForImageClassification, data: Data, setting: FineTuning, seed: int, progress: Callable[[str], None]
) -> None:
    """Train a classifier, encoder and all."""
    device = model.device
    trainer = Trainer(model, fine_tuning_optimizer(model, setting), data, setting.batch_size, setting.epochs, seed)
    while len(trainer.losses) < setting.epochs:
        loss = trainer.train_epoch(lambda x, y: {"pixel_values": x.to(device), "labels": y.to(device)})
        progress(f"fine-tuning epoch {len(trainer.losses)}, loss {loss:.3f}")


def train(
    *,
    method: str,
    seed: int,
    device: torch.device,
    progress: Callable[[str], None],
    folder: str = "",
    workers: int = 0,
    checkpoints: str = "",
    part: str = "test",
    **settings: Any,
) -> float:
    """Pre-train and fine-tune; accuracy in per cent.

    Args:
        method: ``none``: fine-tune an encoder as it was initialised; ``mae``; ``dcl``: mae with DCL.
        folder: of the data; empty: where they usually are.
        workers: processes that read image files.
        part: what the accuracy is of: "test", or "validation" for choices.
        checkpoints: folder of the pre-trained autoencoders, which are gone on with or taken from there; empty: none.
        settings: fields of :class:`Pretraining` and :class:`FineTuning`.
    """
    before, after = (made(**{name: settings[name] for name in asdict(made())}) for made in (Pretraining, FineTuning))
    files = {"folder": folder or None, "workers": workers}
    unlabelled = datasets.load(before.pretraining_data, train_size=before.pictures or None, **files)
    labelled = datasets.load(after.data, train_size=after.labels or None, **files)
    if labelled.shape != unlabelled.shape:
        raise ValueError(
            f"data={after.data!r} has images of {labelled.shape}, but pretraining_data={before.pretraining_data!r} "
            f"of {unlabelled.shape}; choose two of one shape"
        )
    torch.manual_seed(seed)
    encoder = autoencoder(before, unlabelled.shape).to(device)
    if method != "none":
        torch.manual_seed(seed)  # of the masks
        checkpoint = Path(checkpoints) / f"{method}-{seed}.pt" if checkpoints else None
        pretrain(encoder, unlabelled, before, method, seed, checkpoint, progress)
    torch.manual_seed(seed)  # of the new head
    model = classifier(encoder, labelled.classes).to(device)
    fine_tune(model, labelled, after, seed, progress)
    return accuracy(model, labelled.fixed(part), device, logits=attrgetter("logits"))


ROWS = {
    "no pre-training": Row({"method": "none"}),
    "MAE": Row({"method": "mae"}, against="no pre-training"),
    "MAE, DCL": Row({"method": "dcl"}, against="MAE"),
}
SETTINGS = (
    asdict(Pretraining()) | asdict(FineTuning()) | {"folder": "", "workers": 0, "checkpoints": "", "part": "test"}
)
BOUNDS = {"pictures": (0,), "labels": (0,), "workers": (0,), "mask_ratio": (0, 1), "layer_decay": (0, 1)}
APPLICATION = Application("masked-autoencoder", "accuracy, %", train, ROWS, SETTINGS, BOUNDS)

if __name__ == "__main__":
    main(APPLICATION, __doc__)
