"""One thread for all tests: the tensors are tiny, and threads only fight each other on a busy machine."""

import torch

torch.set_num_threads(1)
