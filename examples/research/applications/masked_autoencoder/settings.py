"""What the command line can change."""

from __future__ import annotations

from dataclasses import dataclass

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    | {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1}
    | {"decoder_num_attention_heads": 4, "decoder_intermediate_size": 64},
    "base": {},  # ViT-B with a decoder of 8 layers: transformers' own values
}
TARGETS = ("pixels", "normalized")


@dataclass(frozen=True)
class Pretraining:
    """What makes an encoder.

    Attributes:
        pretraining_data: whose training images it sees, without their labels.
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
    weight: float = 0.1
    pretraining_epochs: int = 30
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
        data: what it is to tell apart; images of the size that the encoder saw.
        labels: how many training images have one; 0: all.
        layer_decay: the learning rate of a layer divided by the next one's.
    """

    data: str = "fashion-mnist"
    labels: int = 300
    epochs: int = 100
    batch_size: int = 32
    lr: float = 1e-3
    layer_decay: float = 0.75
