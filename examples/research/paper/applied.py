"""The tables of the applications: fine-tuning, FixMatch, masked autoencoders, distillation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from examples.research.paper.recipes import CIFAR100, FINE, FINE_IMAGES, IMAGENET, Recipe
from examples.research.paper.rows import Row, Table, Work

DATA = {
    "ImageNet": "tiny-imagenet-224",
    "Food-101": "food101",
    "CUB-200": "cub200",
    "Oxford Pet": "pets",
    "Stanford Car": "cars",
}
FINE_TUNING = {"CE": (82.5, 63.8, 90.9, 78.2), "DCL": (85.0, 64.7, 91.7, 79.0)}
LABELS = {40: (86.2, 88.7), 250: (None, None), 4000: (None, None)}
MAE = {"MAE": (82.8, 87.8, 79.2, 91.5, 82.5), "MAE+DCL": (83.4, 88.8, 80.0, 92.0, 87.2)}
DISTILLATION = {
    "Student": ("plain", 72.5, 74.5),
    "KD": ("KD", 74.0, 75.2),
    "ReviewKD": ("ReviewKD", 75.6, 76.2),
    "SimKD": ("SimKD", 77.8, 78.0),
    "DKD": ("DKD", 75.9, 76.5),
}
TEACHER = ("resnet32x4", 79.4)
STEPS = 1024  # that FixMatch counts as an epoch


def fine_tuning(recipe: Recipe) -> Table:
    """EfficientNet-B0 from ImageNet on four data sets."""
    rows = []
    for label, numbers in FINE_TUNING.items():
        method = "plain" if label == "CE" else "dcl"
        for column, paper in zip(list(DATA)[1:], numbers, strict=True):
            work = recipe.work(replace(FINE, data=DATA[column]), method, pretrained=True)
            rows.append(Row(label, column, work, paper))
    remark = (
        "Open in the paper, chosen here: 60 epochs of SGD, batches of 128, a rate of 0.02, a weight decay of 5e-4. "
        f"{FINE_IMAGES}, as the pretrained network's are."
    )
    return Table("EfficientNet-B0 fine-tuned from ImageNet", "Table 3", rows, remark)


def semi_supervised(recipe: Recipe) -> Table:
    """FixMatch with few labels."""
    plain = replace(CIFAR100, data="cifar10", network="wrn-28-2", epochs=1024, batch_size=64, lr=0.03)
    rows = []
    for count, numbers in LABELS.items():
        details = {"labels": count, "ratio": 7, "threshold": 0.95, "unlabelled_weight": 1.0, "average": 0.999}
        details |= {"steps": STEPS}
        for line, method, paper in zip(("FixMatch", "FixMatch+DCL"), ("plain", "dcl"), numbers, strict=True):
            work = recipe.work(plain, method, task="fixmatch", details=details)
            rows.append(Row(line, f"{count} labels", work, paper))
    remark = "The paper's text has the numbers of 40 labels alone; the other points of its figure have no numbers."
    return Table("FixMatch on CIFAR-10 with few labels", "Figure 4", rows, remark)


def self_supervised(recipe: Recipe) -> Table:
    """Masked autoencoders of ImageNet, fine-tuned on five data sets."""
    plain = replace(
        IMAGENET,
        data="imagenet-resized",
        network="vit-base",
        epochs=800,
        optimizer="adamw",
        lr=1.5e-4,
        weight_decay=0.05,
        augmentation="basic",
    )
    tuned = replace(plain, epochs=100, lr=5e-4)
    rows = []
    for line, numbers in MAE.items():
        method = "plain" if line == "MAE" else "dcl"
        options = {"distance": "squared"} if method == "dcl" else {}  # pixels are no logits
        encoder = recipe.work(plain, method, options=options, task="reconstruct", details={"mask_ratio": 0.75})
        for column, paper in zip(DATA, numbers, strict=True):
            details = {"layer_decay": 0.65}
            work = recipe.work(replace(tuned, data=DATA[column]), task="tune", details=details, needs=encoder)
            rows.append(Row(line, column, work, paper))
    remark = (
        "Open in the paper, He et al.'s here: 800 epochs of pre-training with RandomResizedCrop and mirror (a run for "
        "each line, of seed 0), 100 of fine-tuning, without their mixup, CutMix, RandAugment and stochastic depth. The "
        "column ImageNet is of Tiny-ImageNet, scaled to 224 pixels: the caption says so, and the text has small data "
        f"sets alone. {FINE_IMAGES}."
    )
    return Table("ViT-B pre-trained as a masked autoencoder, fine-tuned", "Table 4", rows, remark)


def distillation(recipe: Recipe) -> Table:
    """ResNet32x4 teaches ResNet8x4, with and without DCL."""
    plain = replace(CIFAR100, epochs=240, batch_size=64, lr=0.05)
    student = replace(plain, network="resnet8x4")

    def work(network: Any, kind: str, method: str = "plain", needs: Work | None = None) -> Work:
        return recipe.work(network, method, task="distill", details={"kind": kind, "warmup": 20}, needs=needs)

    teacher = work(replace(plain, network=TEACHER[0]), "plain")
    rows = [Row("w/o DCL", "Teacher", teacher, TEACHER[1])]
    for column, (kind, without, with_dcl) in DISTILLATION.items():
        needs = None if kind == "plain" else teacher
        rows.append(Row("w/o DCL", column, work(student, kind, needs=needs), without))
        rows.append(Row("w/ DCL", column, work(student, kind, "dcl", needs), with_dcl))
    remark = (
        "The teacher is trained here, once, by the recipe of the literature; the paper takes SimKD's published one."
    )
    return Table("ResNet32x4 teaches ResNet8x4: KD, ReviewKD, SimKD, DKD", "Table 5", rows, remark)
