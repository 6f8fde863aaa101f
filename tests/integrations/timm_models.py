"""Small timm models, batches of images and a base optimizer that the tests of timm share."""

import timm
import timm.optim
import torch

CLASSES, SIZE = 5, 32
TINY = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": SIZE, "patch_size": 8}
MODELS = {
    "resnet10t": {"drop_path_rate": 0.3, "drop_rate": 0.2},
    "vit_tiny_patch16_224": TINY | {"drop_path_rate": 0.5, "patch_drop_rate": 0.2},
    "mobilenetv3_small_050": {"drop_rate": 0.2, "drop_path_rate": 0.2},
}
VIT = "vit_tiny_patch16_224"


def create(name=VIT, seed=0, **options):
    torch.manual_seed(seed)
    return timm.create_model(name, num_classes=CLASSES, **MODELS.get(name, {}) | options).double()


def images(steps, size=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(size, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
        yield x, torch.randint(CLASSES, (size,), generator=generator)


def adamw(model):
    return timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
