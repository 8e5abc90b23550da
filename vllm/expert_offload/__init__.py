# SPDX-License-Identifier: Apache-2.0
"""Experts of a mixture-of-experts model in host memory: the part that a patched vLLM release calls.

Read in this order: `roles` (what may leave the GPU), `selection` (what does), `fit` (whether it fits), `host` (where
it goes; `cuda` is the driver below it), `memory` (what the release allows), `residency` (how it moves, and the
audit), `deferred`, `tape` and `apart` (how a layer's processing is written down), `repack` (and played in place),
<<<<<<< HEAD
`staging` (how kernels find weights where memory is not mapped), `pooled` (how experts in use are kept on the GPU, by
`twin` and `pool`), `offloader` (the whole, in the order of a start),
`graphs` (CUDA graphs beside blocking copies), `report`.
=======
`staging` (how kernels find weights where memory is not mapped), `offloader` (the whole, in the order of a start),
`graphs` (CUDA graphs beside blocking copies), `report`. Then `pool` and `pool_kernels` (slots on the GPU for the
experts in use; they need Triton and are not imported here), and `slots` (how many fit).
>>>>>>> pool
"""

from .graphs import GraphPlan, join_cuts, plan_graphs
from .memory import Memory
from .offloader import Offloader, cache_factor
from .staging import current

__all__ = ["GraphPlan", "Memory", "Offloader", "cache_factor", "current", "join_cuts", "plan_graphs"]
