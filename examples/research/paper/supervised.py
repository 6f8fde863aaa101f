"""The tables of classification from scratch: the main one, the rivals, augmentations, and the figures."""

from __future__ import annotations

from dataclasses import replace

from examples.research.paper.recipes import (
    CIFAR100,
    CLASS_MEANS,
    HALF_SQUARED,
    IMAGENET,
    LARGE_IMAGES,
    SMALL_IMAGES,
    TINY,
    TRANSFORMER,
    WIDE,
    Recipe,
)
from examples.research.paper.rows import Row, Table

NETWORKS = {
    "ResNet18": "resnet18",
    "ResNet34": "resnet34",
    "ResNet50": "resnet50",
    "ShuffleNetV2": "shufflenetv2",
    "ViT-T": "vit-tiny",
    "Swin-T": "swin-tiny",
}
# Per cent by CE, by fine-tuning from ImageNet (PT) where there is one, and by DCL.
CIFAR_100 = {
    "ResNet18": (78.3, 80.5, 82.4),
    "ResNet34": (80.6, 82.6, 83.1),
    "ResNet50": (82.1, 82.9, 83.6),
    "ShuffleNetV2": (72.8, 73.5, 74.0),
}
TINY_IMAGENET = {
    "ResNet18": (61.8, 64.6),
    "ResNet34": (64.0, 66.8),
    "ResNet50": (64.4, 67.0),
    "ShuffleNetV2": (53.9, 55.5),
}
IMAGENET_1K = {"ResNet18": (69.5, 70.5), "ResNet50": (76.0, 77.1), "ViT-T": (65.7, 66.5), "Swin-T": (81.3, 81.7)}
# Per cent and standard error on CIFAR-100 with ResNet18 and WRN28-10, and on ImageNet with ResNet50.
BASELINES = {
    "CE": ((78.3, 0.32), (81.4, 0.13), (76.0, 0.19)),
    "DML": ((79.9, 0.32), (82.7, 0.14), (75.8, 0.15)),
    "SAM": ((79.3, 0.25), (83.4, 0.06), (76.5, 0.11)),
    "PSKD": ((80.6, 0.26), (81.9, 0.10), (76.3, 0.15)),
    "SAF": ((80.8, 0.08), (83.8, 0.04), (76.4, 0.15)),
    "GAM": ((80.5, 0.24), (83.5, 0.09), (76.6, 0.19)),
    "DCL": ((82.4, 0.26), (84.2, 0.10), (77.1, 0.15)),
    "DCP": ((81.0, 0.21), (83.8, 0.09)),
}
METHODS = {
    "CE": ("plain", {}),
    "DML": ("dml", {}),
    "SAM": ("plain", {"rho": 0.05}),
    "PSKD": ("ps-kd", {}),
    "SAF": ("saf", {}),
    "GAM": ("gam", {}),
    "DCL": ("dcl", {}),
    "DCP": ("dcp", {}),
}


def main(recipe: Recipe) -> Table:
    """Three data sets, six networks."""
    rows = []
    for network, (ce, pretrained, dcl) in CIFAR_100.items():
        line, plain = f"CIFAR-100 {network}", replace(CIFAR100, network=NETWORKS[network])
        enlarged = replace(plain, data="cifar100-224", epochs=60, lr=0.02)
        rows += [
            Row(line, "CE", recipe.work(plain), ce),
            Row(line, "PT", recipe.work(enlarged, pretrained=True), pretrained),
            Row(line, "DCL", recipe.work(plain, "dcl"), dcl),
        ]
    for data, base, found in (("Tiny-ImageNet", TINY, TINY_IMAGENET), ("ImageNet", IMAGENET, IMAGENET_1K)):
        for network, (ce, dcl) in found.items():
            like = TRANSFORMER if network in ("ViT-T", "Swin-T") else base
            line, plain = f"{data} {network}", replace(like, network=NETWORKS[network])
            rows += [
                Row(line, "CE", recipe.work(plain), ce),
                Row(line, "DCL", recipe.work(plain, "dcl"), dcl),
            ]
    remark = (
        f"{HALF_SQUARED}. The paper's Gain is DCL minus CE. Its errors are bounds, within 0.26 on CIFAR-100 and 0.2 on "
        "the others, and Table 2 has 0.32 for CE: none is shown. Open in the paper, chosen here: PT's 60 epochs of SGD "
        "with a rate of 0.02 and a weight decay of 5e-4, AdamW's rate of 2.5e-4 and weight decay of 0.05, no warm-up, "
        f"ImageNet's weight decay of 1e-4. {SMALL_IMAGES}; {LARGE_IMAGES}."
    )
    return Table("CE, fine-tuned from ImageNet (PT), and DCL; three data sets, six networks", "Table 1", rows, remark)


def baselines(recipe: Recipe) -> Table:
    """DCL and DCP beside five rivals."""
    places = {"CIFAR-100 ResNet18": CIFAR100, "CIFAR-100 WRN28-10": WIDE, "ImageNet ResNet50": IMAGENET}
    rows = []
    for label, numbers in BASELINES.items():
        method, options = METHODS[label]
        for (column, plain), (paper, error) in zip(places.items(), numbers, strict=False):
            rows.append(Row(label, column, recipe.work(plain, method, options=options), paper, error))
    remark = (
        "The rivals have their authors' settings for CIFAR-100, on ImageNet too, where the paper has tuned them with "
        "batches of 256. Ours (MSE) of Table 2 is DCL. CE's error of 0.32 is larger than Table 1's bound of 0.26. "
        f"{CLASS_MEANS}. {HALF_SQUARED}. {LARGE_IMAGES}."
    )
    return Table("DCL and DCP beside DML, SAM, PS-KD, SAF and GAM", "Tables 2 and 8", rows, remark)


def augmentations(recipe: Recipe) -> Table:
    """Crop and mirror, and TrivialAugment."""
    numbers = {
        "CIFAR-100 WRN28-10": (WIDE, ((81.4, 84.2), (84.3, 85.7))),
        "ImageNet ResNet50": (IMAGENET, ((76.0, 77.1), (76.2, 77.3))),
    }
    rows = []
    for data, (plain, found) in numbers.items():
        for name, pair in zip(("Basic", "TA"), found, strict=True):
            chosen = replace(plain, augmentation="trivial") if name == "TA" else plain
            rows += [
                Row(f"{data} {name}", column, recipe.work(chosen, method), paper)
                for column, method, paper in zip(("CE", "DCL"), ("plain", "dcl"), pair, strict=True)
            ]
    remark = (
        "Basic has Table 1's numbers on ImageNet, so it has RandAugment here too, as the paper's appendix says. "
        f"{LARGE_IMAGES}."
    )
    return Table("Crop and mirror (Basic), and TrivialAugment (TA)", "Table 7", rows, remark)


def figures(recipe: Recipe) -> Table:
    """What the paper draws from CIFAR-100: non-targets, variation, logits."""
    rows = [
        Row(network, label, recipe.work(replace(CIFAR100, network=NETWORKS[network]), method))
        for network in CIFAR_100
        for label, method in (("CE", "plain"), ("DCL", "dcl"))
    ]
    remark = "The figures have no numbers in the text: they are drawn, and consistency and perplexity are in the table."
    title = "Top non-target consistency and perplexity, logits along the training and by t-SNE"
    return Table(title, "Figures 1 to 3, 5 and 6", rows, remark)
