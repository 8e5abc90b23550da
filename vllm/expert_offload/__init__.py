# SPDX-License-Identifier: Apache-2.0
"""Experts of a mixture-of-experts model in host memory: the part that a patched vLLM release calls.

Read in this order: `roles` (what may leave the GPU), `selection` (what does), `fit` (whether it fits), `host` (where
it goes; `cuda` is the driver below it), `memory` (what the release allows), `residency` (how it moves, and the
audit), `deferred`, `standin`, `tape` and `apart` (how a layer's processing is written down), `scales` (and that of
scales, which stay on the GPU), `repack` (and played in place), `staging` (how kernels find weights where memory is not
mapped), `pooled` (how experts in use are kept on the GPU: a layer's `twin`, slots of a `pool` that needs Triton and is
imported there alone, its `pool_kernels`, and `slots`, how many fit; whole layers by a `stream`), `offloader` (the
whole, in the order of a start), `graphs` (CUDA graphs beside blocking copies), `report`.
"""

from .graphs import GraphPlan, join_cuts, plan_graphs
from .memory import Memory
from .offloader import Offloader, cache_factor
from .staging import current

__all__ = ["GraphPlan", "Memory", "Offloader", "cache_factor", "current", "join_cuts", "plan_graphs"]
