# SPDX-License-Identifier: Apache-2.0
"""A small model made of the release's own expert layers, with the opaque expert op forced on as on a GPU."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

import torch
from torch import nn

HIDDEN, WIDTH, EXPERTS, LAYERS = 64, 32, 8, 3


def runner_of(experts: nn.Module) -> object:
    """The object that runs the layer: an attribute of it in v0.18.0, the layer itself later."""
    return getattr(experts, "runner", experts)


class Layer(nn.Module):
    """A decoder layer: norm, router, experts."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        import vllm.model_executor.layers.fused_moe as fused_moe

        make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = make(
            num_experts=EXPERTS,
            top_k=2,
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            params_dtype=torch.float32,
            renormalize=True,
            prefix=f"{prefix}.experts",
        )
        runner = runner_of(self.experts)
        name = "moe_forward" if hasattr(runner, "moe_forward") else "_forward_entry"
        setattr(runner, name, torch.ops.vllm.moe_forward)  # the CPU platform calls the Python function instead

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden_states)
        return hidden_states + self.experts(x, self.gate(x))


class Model(nn.Module):
    """`LAYERS` layers, made by the release's own `make_layers`, so that its offloader sees them."""

    def __init__(self, make: Callable[[str], nn.Module]) -> None:
        super().__init__()
        from vllm.model_executor.models.utils import make_layers

        _, _, self.layers = make_layers(LAYERS, lambda prefix: make(prefix), "model.layers")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@contextlib.contextmanager
def engine():
    """The release's configuration and process group, as a worker has them; yields the configuration."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    config = VllmConfig(compilation_config=CompilationConfig())
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            yield config
        finally:
            cleanup_dist_env_and_memory()


def build(config, make: Callable[[str], nn.Module] = Layer) -> Model:
    """A model whose layers are registered anew under the same names."""
    config.compilation_config.static_forward_context.clear()
    getattr(config.compilation_config, "static_all_moe_layers", []).clear()
    torch.manual_seed(0)
    return Model(make)


@torch.no_grad()
def fill(model: Model, seed: int = 1) -> None:
    """Weights that depend on the seed alone, large enough for an expert to matter."""
    g = torch.Generator().manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        p.data.copy_(torch.randn(p.shape, generator=g) * (0.5 if p.dim() == 3 else 0.2))


def process(model: Model) -> None:
    """The release's own post-load processing."""
    from types import SimpleNamespace

    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    settings = SimpleNamespace(dtype=torch.float32, quantization=None, word_embeddings_untied_by_checkpoint=False)
    process_weights_after_loading(model, settings, torch.device("cpu"))


def run(model: nn.Module, config, x: torch.Tensor) -> torch.Tensor:
    """One forward pass with the context in which the expert op finds its layer."""
    from vllm.forward_context import set_forward_context

    with torch.no_grad(), set_forward_context(None, config):
        return model(x)
