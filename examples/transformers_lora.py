"""transformers' Trainer with PEFT's LoRA: which module of Python's library does a docstring come from?

    python -m examples.transformers_lora
    python -m examples.transformers_lora --method dcl --model path/to/a/model --epochs 3

Without --model a tiny BERT with random weights is adapted, in about twenty seconds on a laptop: it shows the wiring,
not what LoRA can do. The companion shares the frozen weights; the table says what it adds.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainingArguments

from dcl_optim import DCLOptimizer, DCPOptimizer

MODULES = ("argparse", "datetime", "decimal", "email.message", "logging", "statistics", "tarfile", "zipfile")
LENGTH = 96


def docstrings(module: Any) -> Iterator[str]:
    """The docstrings of a module's functions and classes, and of the latter's methods."""
    own = [thing for thing in vars(module).values() if getattr(thing, "__module__", None) == module.__name__]
    methods = [method for thing in own if inspect.isclass(thing) for method in vars(thing).values()]
    for thing in own + methods:
        text = inspect.getdoc(thing) if inspect.isclass(thing) or inspect.isroutine(thing) else None
        if text and len(text) >= 20:
            yield text


def as_bytes(text: str) -> tuple[Tensor, Tensor]:
    """A text as its first bytes, and which places hold one: no tokenizer has to be downloaded."""
    words = torch.frombuffer(bytearray(text.encode()[:LENGTH]), dtype=torch.uint8).long()
    padding = LENGTH - len(words)
    return nn.functional.pad(words, (0, padding)), nn.functional.pad(torch.ones_like(words), (0, padding))


def texts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and test rows, without duplicates; a text's checksum says which it belongs to."""
    rows: dict[str, int] = {}
    for label, name in enumerate(MODULES):
        for text in docstrings(importlib.import_module(name)):
            rows.setdefault(text, label)
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for text, label in rows.items():
        words, mask = as_bytes(text)
        held_out = zlib.crc32(text.encode()) % 4 == 0
        parts[held_out].append({"input_ids": words, "attention_mask": mask, "labels": label})
    return parts


def build(path: Path | None) -> nn.Module:
    """The pretrained model at a path, or a tiny random one, with LoRA on its attention and a head that trains."""
    if path is not None:
        new_head = {"num_labels": len(MODULES), "ignore_mismatched_sizes": True}
        model = AutoModelForSequenceClassification.from_pretrained(path, **new_head)
    else:
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        config = BertConfig(vocab_size=256, max_position_embeddings=LENGTH, num_labels=len(MODULES), **size)
        model = AutoModelForSequenceClassification.from_config(config)
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS"
    )
    return get_peft_model(model, lora)


def optimizer_for(method: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    if method == "dcp":
        return DCPOptimizer(optimizer, model)
    if method == "dcl":
        return DCLOptimizer(optimizer, model)
    return optimizer


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("plain", "dcp", "dcl"), default="dcp")
    parser.add_argument("--model", type=Path, help="folder of a pretrained model that save_pretrained wrote")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--out", type=Path, help="folder of Trainer's checkpoints (default: none are kept)")
    parser.add_argument("--resume", type=Path, metavar="PATH", help="continue from one of Trainer's checkpoints")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    options = parse(arguments)
    torch.manual_seed(0)
    train, test = texts()
    model = build(options.model)
    optimizer = optimizer_for(options.method, model, options.lr)
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            str(options.out or scratch),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=32,
            save_strategy="epoch" if options.out else "no",
            report_to=[],
            logging_steps=50,
        )
        parts = {"train_dataset": train, "eval_dataset": test, "compute_metrics": accuracy}
        trainer = Trainer(model, settings, optimizers=(optimizer, None), **parts)
        trainer.train(resume_from_checkpoint=options.resume and str(options.resume))
        found = trainer.evaluate()["eval_accuracy"]
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True)]
    most = max(sum(row["labels"] == label for row in test) for label in range(len(MODULES))) / len(test)
    print(f"{len(train)} training and {len(test)} test texts, {len(MODULES)} modules; most frequent {most:.3f}")
    print(f"{options.method}: test accuracy {found:.3f}; {sizes[0]:,} of {sizes[1]:,} parameters train")
    if isinstance(optimizer, DCLOptimizer):
        shared = {id(parameter) for parameter in model.parameters()}
        added = sum(p.numel() for p in optimizer.companion.parameters() if id(p) not in shared)
        print(f"the companion adds {added:,} parameters")
    return model, optimizer


if __name__ == "__main__":
    main()
