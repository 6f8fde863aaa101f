"""transformers' Trainer with PEFT's LoRA: which module of Python's library does a docstring come from?

    python -m examples.transformers_lora
    python -m examples.transformers_lora --method dcl --model path/to/a/model --epochs 3

Without --model a tiny BERT with random weights reads bytes, in about twenty seconds on a laptop: it shows the wiring,
not what LoRA can do. The companion shares the frozen weights.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from sklearn.model_selection import train_test_split
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    ByT5Tokenizer,
    Trainer,
    TrainingArguments,
)

from dcl_optim import DCLOptimizer, DCPOptimizer

MODULES = ("argparse", "configparser", "datetime", "email.message", "logging", "statistics", "tarfile", "zipfile")
LENGTH = 96


def docstrings() -> dict[str, int]:
    """Give each docstring of the modules once, with the number of its module."""
    found: dict[str, int] = {}
    for label, name in enumerate(MODULES):
        for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(name)))):
            text = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None
            if text and len(text) >= 20:
                found.setdefault(text, label)
    return found


def build(path: Path | None) -> tuple[nn.Module, Any]:
    """The pretrained model at a path, or a tiny random one, with LoRA on its attention; its tokenizer."""
    if path is not None:
        tokenizer = AutoTokenizer.from_pretrained(path)
        new_head = {"num_labels": len(MODULES), "ignore_mismatched_sizes": True}
        model = AutoModelForSequenceClassification.from_pretrained(path, **new_head)
    else:
        tokenizer = ByT5Tokenizer()  # of bytes, which nobody has to download
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=LENGTH, num_labels=len(MODULES), **size)
        model = AutoModelForSequenceClassification.from_config(config)
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS"
    )
    return get_peft_model(model, lora), tokenizer


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
    parser.add_argument("--model", type=Path, help="folder of a pretrained model and its tokenizer")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--out", type=Path, help="folder of Trainer's checkpoints (default: none are kept)")
    parser.add_argument("--resume", help="continue from one of Trainer's checkpoints")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    options = parse(arguments)
    torch.manual_seed(0)
    model, tokenizer = build(options.model)
    rows = [
        {**tokenizer(text, truncation=True, max_length=LENGTH), "labels": label} for text, label in docstrings().items()
    ]
    train, test = train_test_split(rows, random_state=0)
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
        trainer = Trainer(model, settings, optimizers=(optimizer, None), processing_class=tokenizer, **parts)
        trainer.train(resume_from_checkpoint=options.resume)
        found = trainer.evaluate()["eval_accuracy"]
    print(f"{options.method}: accuracy {found:.3f} on {len(test)} texts of {len(MODULES)} modules")
    model.print_trainable_parameters()
    return model, optimizer


if __name__ == "__main__":
    main()
