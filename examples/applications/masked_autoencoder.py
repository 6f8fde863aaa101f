"""Masked autoencoders pre-trained with and without Deep Companion Learning, fine-tuned on few labels.

    python -m examples.applications.masked_autoencoder --seeds 3

He et al., Masked Autoencoders Are Scalable Vision Learners, CVPR 2022: three patches of four are hidden, and the loss
is the mean squared error of the reconstruction on them. With DCL the companion reconstructs the same picture from the
same patches, and the two reconstructions, of all patches, are held together (DCL paper, "Self-Supervised Pretraining").
The companion stays behind when the encoder moves on: fine-tuning is the same in all rows, without DCL.

The rows of a seed start from the same weights and see the same pictures with the same patches hidden; the first one is
fine-tuned without pre-training. By default a small network and Fashion-MNIST, with labels for few of its pictures.
The paper's Table 4 (ViT-B, ImageNet) comes without epochs and learning rates; with He et al.'s, and the batches of 256
that the DCL paper takes for ImageNet:

    python -m examples.applications.masked_autoencoder --size base --patch 16 --target normalized --device cuda \
        --pretraining-data imagenet --pictures 0 --pretraining-epochs 800 --pretraining-batch-size 256 \
        --pretraining-lr 1.5e-4 --data cub200 --labels 0 --epochs 100 --batch-size 256 --lr 5e-4 --layer-decay 0.65 \
        --folder runs/data --workers 8 --checkpoints runs/masked-autoencoder

Another ``--data`` then takes the same encoders from ``--checkpoints``. He et al. also fine-tune with stochastic depth,
mixup, CutMix and RandAugment, which are not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import ViTConfig, ViTForImageClassification, ViTMAEConfig, ViTMAEForPreTraining
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from dcl_optim import DCLOptimizer
from examples.applications.classification import accuracy
from examples.applications.comparison import Application, Row, main
from examples.checkpoint import random_states, restore_random_states, save_atomically
from examples.paper import datasets
from examples.paper.datasets import Data

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    | {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1}
    | {"decoder_num_attention_heads": 4, "decoder_intermediate_size": 64},
    "base": {},  # ViT-B with a decoder of 8 layers: transformers' own values
}
PICTURES = ("image_size", "patch_size", "num_channels")
ENCODER = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", *PICTURES)
TARGETS = ("pixels", "normalized")
# He et al., Tables 8 and 9: of both trainings, 40 of 800 epochs being as large a part as 5 of 100.
WEIGHT_DECAY, WARMUP = 0.05, 0.05


@dataclass(frozen=True)
class Pretraining:
    """What makes an encoder.

    Attributes:
        pretraining_data: whose training pictures it sees, without their labels.
        pictures: how many of them; 0: all.
        size: a key of :data:`SIZES`.
        patch: side of the square patches, in pixels.
        mask_ratio: the part of the patches that is hidden.
        target: ``pixels``, or ``normalized``: by each patch's own mean and variance.
        weight: DCL's λ.
        pretraining_lr: He et al.: 1.5e-4 for batches of 256, in proportion for others.
    """

    pretraining_data: str = "fashion-mnist"
    pictures: int = 5000
    size: str = "tiny"
    patch: int = 4
    mask_ratio: float = 0.75
    target: str = "normalized"
    weight: float = 1.0
    pretraining_epochs: int = 10
    pretraining_batch_size: int = 64
    pretraining_lr: float = 2e-3

    def __post_init__(self) -> None:
        for name, value, known in (("size", self.size, SIZES), ("target", self.target, TARGETS)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")


@dataclass(frozen=True)
class FineTuning:
    """What makes a classifier of an encoder.

    Attributes:
        data: what it is to tell apart; pictures of the size that the encoder saw.
        labels: how many training pictures have one; 0: all.
        layer_decay: the learning rate of a layer divided by the next one's.
    """

    data: str = "fashion-mnist"
    labels: int = 300
    epochs: int = 25
    batch_size: int = 32
    lr: float = 1e-3
    layer_decay: float = 0.75


class Trainer:
    """A model that returns its loss, and what trains it: warm-up and cosine, batches in an order of the seed's.

    Args:
        model: called with what ``feed`` makes of a batch.
        optimizer: with or without DCL: nothing here depends on it.
        epochs: until the learning rate is zero.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, data: Data, batch_size: int, epochs: int, seed: int
    ) -> None:
        self.model, self.optimizer, self.data, self.batch_size = model, optimizer, data, batch_size
        samples = data.train_size()
        steps = epochs * math.ceil((samples - (samples % batch_size == 1)) / batch_size)
        self.scheduler: LRScheduler = cosine_with_warmup(optimizer, round(WARMUP * steps), steps)
        self.generator = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []

    def train_epoch(self, feed: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> float:
        """Train on every picture once; returns the mean loss."""
        self.model.train()
        losses = [self._step(feed(x, y)) for x, y, _ in self.data.epoch(self.batch_size, self.generator)]
        self.losses.append(float(torch.stack(losses).mean()))
        return self.losses[-1]

    def _step(self, batch: dict[str, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, path: Path, setting: Pretraining) -> None:
        """Write all that a bit-exact continuation needs; the masks are drawn from torch's global generator."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        own = {"random": random_states(self.generator), "losses": self.losses, "setting": asdict(setting)}
        save_atomically(state | own, path)

    def resume(self, path: Path, setting: Pretraining) -> None:
        """Take over what :meth:`save` wrote; ValueError where that was for another setting."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["setting"] != asdict(setting):
            raise ValueError(f"{path} was pre-trained with {state['setting']}; choose another folder for checkpoints")
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        restore_random_states(state["random"], self.generator)
        self.losses = state["losses"]


def autoencoder(setting: Pretraining, shape: tuple[int, int, int]) -> ViTMAEForPreTraining:
    """The masked autoencoder for pictures of a shape (channels, height, width)."""
    channels, height, width = shape
    if height != width or setting.patch < 1 or height % setting.patch:
        raise ValueError(f"patch={setting.patch} does not cut pictures of {height}x{width} evenly; choose a divisor")
    pictures = dict(zip(PICTURES, (height, setting.patch, channels), strict=True))
    masking = {"mask_ratio": setting.mask_ratio, "norm_pix_loss": setting.target == "normalized"}
    model = ViTMAEForPreTraining(ViTMAEConfig(**SIZES[setting.size], **pictures, **masking))
    # transformers 5.23 ends its construction with zeros here: the decoder would not know which patch it is to fill in.
    model.decoder.initialize_weights((height // setting.patch) ** 2)
    return model


def pretraining_optimizer(model: nn.Module, setting: Pretraining, method: str) -> Optimizer:
    """AdamW as He et al. have it, and DCL around it."""
    groups = param_groups_weight_decay(model, WEIGHT_DECAY)
    optimizer: Optimizer = torch.optim.AdamW(groups, lr=setting.pretraining_lr, betas=(0.9, 0.95))
    if method == "dcl":
        # The outputs are pixels: no agreement on a class can weigh the penalty, which the paper's preset leaves out.
        pixels = {"logits": attrgetter("logits"), "class_dim": -1, "loss_scale": 1.0}
        optimizer = DCLOptimizer(optimizer, model, preset="paper", weight=setting.weight, **pixels)
    return optimizer


def classifier(encoder: ViTMAEForPreTraining, classes: int) -> ViTForImageClassification:
    """A linear layer on the class token of the encoder, which sees all patches now; the decoder is left behind."""
    same = {name: getattr(encoder.config, name) for name in ENCODER}
    model = ViTForImageClassification(ViTConfig(**same, num_labels=classes))
    model.vit.load_state_dict(encoder.vit.state_dict())
    # What timm's layer decay asks its own models for.
    model.group_matcher = lambda coarse: {"stem": r"vit\.embeddings", "blocks": r"vit\.layers\.(\d+)"}
    return model


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
    **settings: Any,
) -> float:
    """Pre-train and fine-tune; test accuracy in per cent.

    Args:
        method: ``none``: fine-tune an encoder as it was initialised; ``mae``; ``dcl``: mae with DCL.
        folder: of the data; empty: where they usually are.
        workers: processes that read picture files.
        checkpoints: folder of the pre-trained autoencoders, which are gone on with or taken from there; empty: none.
        settings: fields of :class:`Pretraining` and :class:`FineTuning`.
    """
    before, after = (made(**{name: settings[name] for name in asdict(made())}) for made in (Pretraining, FineTuning))
    files = {"folder": folder or None, "workers": workers}
    unlabelled = datasets.load(before.pretraining_data, train_size=before.pictures or None, **files)
    labelled = datasets.load(after.data, train_size=after.labels or None, **files)
    if labelled.shape != unlabelled.shape:
        raise ValueError(
            f"data={after.data!r} has pictures of {labelled.shape}, but pretraining_data={before.pretraining_data!r} "
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
    return accuracy(model, labelled.fixed("test"), device, logits=attrgetter("logits"))


ROWS = {
    "no pre-training": Row({"method": "none"}),
    "MAE": Row({"method": "mae"}, against="no pre-training"),
    "MAE, DCL": Row({"method": "dcl"}, against="MAE"),
}
SETTINGS = asdict(Pretraining()) | asdict(FineTuning()) | {"folder": "", "workers": 0, "checkpoints": ""}
APPLICATION = Application("masked-autoencoder", "test accuracy, %", train, ROWS, SETTINGS)

if __name__ == "__main__":
    main(APPLICATION, __doc__)
