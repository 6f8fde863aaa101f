"""The one line that changes, on 100 of scikit-learn's digits (seconds on a laptop).

    python -m examples.minimal

With the line the accuracy on the other 1,697 images is 90.4 %, without it 89.3 % (means of seeds 0 to 9).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dcl_optim import DCPOptimizer


def digits(train_size: float = 0.75) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, train_size=train_size, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = (torch.tensor(part) for part in parts)
    return x_train.float(), y_train, x_test.float(), y_test


def main(seed: int = 0) -> float:
    torch.manual_seed(seed)
    x_train, y_train, x_test, y_test = digits(train_size=100)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=20, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    optimizer = DCPOptimizer(optimizer, model)  # the one line that is new: delete it and you train without

    for _ in range(60):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).double().mean().item()
    print(f"test accuracy {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main()
