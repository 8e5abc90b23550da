# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the twin of an expert layer: slots for all that an expert has, and nothing of the original's."""

from __future__ import annotations

import torch
import walk
from torch import nn

from vllm.expert_offload import pooled, roles
from vllm.expert_offload.twin import Rows, slots_for

SLOTS = 4  # no dimension of a tensor of the layer


def faults(owner: nn.Module) -> list[str] | str:
    """Faults of the twin of a layer that was built and processed; or why it can have none, in words."""
    if why := pooled.unfit(owner):
        return why
    method = roles.method_of(owner)
    before = {path: (t.shape, t.data_ptr()) for path, t in _tensors(owner.quant_method).items()}
    rows = Rows(walk.EXPERTS, SLOTS, lambda t: slots_for(t, SLOTS))
    view, twin = pooled._twin(owner, rows)
    originals = {real.untyped_storage().data_ptr() for real, _ in rows.pairs}

    def strange(tensor: torch.Tensor) -> bool:
        real = tensor.untyped_storage().data_ptr() in originals or tensor.shape[:1] == (walk.EXPERTS,)
        return bool(tensor.numel()) and real

    found = [f"{path} {tuple(t.shape)} is the real layer's" for path, t in _tensors(twin).items() if strange(t)]
    kept = {leaf: p for leaf, p in owner._parameters.items() if p is not None and roles.role_of(method, leaf)}
    for leaf, parameter in kept.items():
        got = getattr(view, leaf)
        if parameter.shape[:1] != (walk.EXPERTS,):
            found += [f"{leaf}: is not shared"] * (got is not parameter)
        elif strange(got) or (got.shape, got.dtype) != ((SLOTS, *parameter.shape[1:]), parameter.dtype):
            found.append(f"{leaf}: {tuple(got.shape)} {got.dtype} stands for {tuple(parameter.shape)}")
    weights = {p.data_ptr() for leaf, p in kept.items() if roles.may_leave(owner, leaf, 3)}
    if not weights or not weights <= {real.data_ptr() for real, _ in rows.pairs}:
        found.append("a weight has no slots")
    if {path: (t.shape, t.data_ptr()) for path, t in _tensors(owner.quant_method).items()} != before:
        found.append("the original was changed")
    return found


def _tensors(root: object) -> dict[str, torch.Tensor]:
    """What can be reached from a method, but not what hangs on a tensor (a loader that knows the layer)."""
    return {path: t for path, t in walk.held(root).items() if "_base" not in path and "weight_loader" not in path}
