"""The benchmark's precision, layout, compilation and device reach every network of a method."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector as flat

from benchmarks.methods import METHODS, start
from benchmarks.setting import Setting
from benchmarks.workloads import WORKLOADS


@pytest.mark.parametrize("method", ["plain", "handwritten DCL", "DCLOptimizer", "DCPOptimizer", "SAM"])
def test_bfloat16_and_channels_last_reach_model_and_companion(method):
    setting = Setting(precision="bf16-channels-last")
    training = start(METHODS[method], dataclasses.replace(WORKLOADS["cnn"], batch_size=4), setting, warm_up=1)
    dtypes: list[torch.dtype] = []
    networks = [training.model] + ([training.second] if training.second else [])
    for network in networks:
        convolution = network[4]
        assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
        assert convolution.weight.dtype == torch.float32
        network.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
        convolution.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    training.step()
    assert set(dtypes) == {torch.bfloat16}
    assert len(dtypes) >= 2 * len(networks)


def test_in_bfloat16_too_the_wrapper_trains_what_the_handwritten_loop_trains():
    setting = Setting(precision="bf16-channels-last")
    small = dataclasses.replace(WORKLOADS["mlp"], batch_size=16)
    wrapped, written = (start(METHODS[name], small, setting, 4) for name in ("DCLOptimizer", "handwritten DCL"))
    torch.testing.assert_close(flat(wrapped.model.parameters()), flat(written.model.parameters()), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("method", "networks"), [("plain", 1), ("handwritten DCL", 2), ("EMA of the weights", 1)])
def test_compiled_networks_are_compiled(method, networks, monkeypatch):
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    training = start(METHODS[method], dataclasses.replace(WORKLOADS["mlp"], batch_size=4), Setting(compiled=True))
    assert len(compiled) == networks
    assert compiled[0] is training.model


def test_the_cpu_is_not_waited_for_and_cuda_is(monkeypatch):
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    Setting("cpu").synchronise()
    assert waited == []
    Setting("cuda:1").synchronise()
    assert waited == ["cuda:1"]
