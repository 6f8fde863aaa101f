#!/usr/bin/env bash
# torch 2.14.1, CPU, one thread: torch.linalg.vector_norm adds up float32 numbers in few accumulators.
# Of 2**25 ones the 1-norm is half of what it should be, since 16,777,216 + 1 is 16,777,216 in float32. tensor.abs().sum()
# adds up in parts, and is exact here. The 2-norm of random numbers is off by a thousandth.
#
# Output seen:
# 1-norm of 33554432 ones: 16777216, abs().sum(): 33554432
# 2-norm of 33554432 random numbers divided by that in float64: 0.9982
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
ones = torch.ones(2**25)
norm = torch.linalg.vector_norm(ones, 1).item()
total = ones.abs().sum().item()
print(f"1-norm of {len(ones)} ones: {norm:.0f}, abs().sum(): {total:.0f}")
random = torch.randn(2**25)
share = torch.linalg.vector_norm(random).item() / torch.linalg.vector_norm(random.double()).item()
print(f"2-norm of {len(random)} random numbers divided by that in float64: {share:.4f}")
raise SystemExit(not (norm == 2**24 and total == 2**25 and share < 0.9995))
PYTHON
