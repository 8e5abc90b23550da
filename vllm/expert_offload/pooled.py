# SPDX-License-Identifier: Apache-2.0
"""The experts of one offloaded layer, run from slots in GPU memory wherever the batch allows it.

A step of few tokens needs few experts, mostly those of the step before. `Pooled` stands where a release calls its
quantization method: it plans and fills the layer's slots (`pool`), and runs the method's twin over them (`twin`). When
a batch may need more experts than there are slots, a second pass of the method itself reads the rest where they lie in
host memory; an expert is in one of the two maps. Batches wider than `WIDEST` have whole layers brought (`stream`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from . import roles
from .residency import Item
from .stream import Stream, Weights, size
from .twin import NoTwin, Rows, View, row_bytes, slots_for, twin_of

if TYPE_CHECKING:
    from .pool import Pool

# Experts objects of the releases that read `expert_map` themselves, so that a row that is not theirs costs nothing.
READS_EXPERT_MAP = {"MarlinExperts", "TritonExperts"}
WIDEST = 32  # tokens of a batch that is planned for; wider ones need most experts


class Layer(NamedTuple):
    """An expert layer whose weights lie in host memory that is mapped.

    `name`: in the report; `weights`: tensors on that memory, by the module's attribute.
    """

    name: str
    module: nn.Module
    weights: Weights


class Pooled:
    """Stands in the place of a quantization method's `apply`, called by name as that is.

    Args:
        method: of the layer; it runs wide batches, and what found no slot.
        pool: slots of the layer.
        twin: the method with the slots' scales.
        view: the layer with the slots for weights, and no expert but those in them: the router's choice is renumbered.
            The same kernels run on the same shapes as without slots, and round alike.
        part: the same with all experts, of which the pool's `expert_map` says which are there, in which slot.
        rest: the layer itself with the pool's `rest_map`.
        rows: [1] int32 on the device, the tokens of the batch that are no padding.

    `stream` brings whole layers, of which this one has the number `number`; None: wide batches read host memory.
    """

    def __init__(
        self, method: Any, pool: Pool, twin: Any, view: View, part: View, rest: View, rows: torch.Tensor
    ) -> None:
        self.method, self.pool, self.twin, self.rows = method, pool, twin, rows
        self.view, self.part, self.rest = view, part, rest
        self.stream: Stream | None = None
        self.number = 0

    def __call__(self, *, layer: nn.Module, x: torch.Tensor, topk_ids: torch.Tensor, **named: Any) -> Any:
        """What `method.apply` returns for hidden states `x` [T, H] and the router's `topk_ids` [T, K]."""
        if topk_ids.shape[0] > WIDEST:
            return self._wide(layer, x=x, topk_ids=topk_ids, **named)
        if topk_ids.numel() <= self.pool.slots:
            slot_ids = torch.empty_like(topk_ids)
            self.pool.plan(topk_ids, self.rows, slot_ids)
            self.pool.fill()
            return self.twin.apply(layer=self.view, x=x, topk_ids=slot_ids, **named)
        self.pool.plan(topk_ids, self.rows)
        self.pool.fill()
        # A method may write its result over its input, or into a workspace that its next call has too.
        out = self.twin.apply(layer=self.part, x=x.clone(), topk_ids=topk_ids, **named).clone()
        if "shared_experts" in named:
            named["shared_experts"] = None  # the first pass has run them
        return out.add_(self.method.apply(layer=self.rest, x=x, topk_ids=topk_ids, **named))

    def _wide(self, layer: nn.Module, **named: Any) -> Any:
        # A graph that is captured piece by piece cannot hold a copy that begins in one piece and ends in the next.
        if self.stream is None or (named["x"].is_cuda and torch.cuda.is_current_stream_capturing()):
            return self.method.apply(layer=layer, **named)
        out = self.method.apply(layer=View(layer, dict(self.stream.take(self.number))), **named)
        self.stream.done(self.number)
        return out


class Pools:
    """The pools of a rank, with the same number of slots in every layer, and a stream for wide batches if it fits too.

    `layers`: each layer that has one; `left_out`: reason -> names of the layers that have none. `rows`: as `Pooled`
    wants it. `counters`: [layers, 6] int64 on the device, as `pool.COUNTERS` says.
    """

    def __init__(self, layers: Iterable[Layer], nbytes: int, device: torch.device) -> None:
        self.left_out: dict[str, list[str]] = {}
        self.layers: list[Layer] = []
        for layer in layers:
            why = unfit(layer.module)
            if why is None:
                self.layers.append(layer)
            else:
                self.left_out.setdefault(why, []).append(layer.name)
        each = sum(bytes_per_slot(layer.module) for layer in self.layers)
        most = max((experts_of(layer.module) for layer in self.layers), default=0)
        streaming = 2 * size([layer.weights for layer in self.layers])
        self.streams = bool(each) and nbytes >= streaming + each
        self.slots = min((nbytes - streaming * self.streams) // each, most) if each else 0
        self.nbytes = self.slots * each + streaming * self.streams
        self.rows = torch.full((1,), WIDEST, dtype=torch.int32, device=device)
        self.counters = torch.zeros((len(self.layers), 6), dtype=torch.int64, device=device)
        self.stream = Stream([layer.weights for layer in self.layers], device) if self.streams else None
        for number, (layer, counters) in enumerate(zip(self.layers, self.counters)):
            if self.slots:
                layer.module.expert_pool = one = pooled(layer.module, self.slots, self.rows, counters)
                one.stream, one.number = self.stream, number

    def valid_rows(self, tokens: int) -> None:
        """The next step's batch has `tokens` tokens; what comes behind them is padding."""
        self.rows.fill_(tokens)

    def written(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget what the slots of layers hold that own one of `parameters`: these have other values now."""
        changed = {id(parameter) for parameter in parameters}
        if self.stream is not None:
            self.stream.forget()
        for layer in self.layers:
            pool = getattr(layer.module, "expert_pool", None)
            if isinstance(pool, Pooled) and any(id(p) in changed for p in layer.module._parameters.values()):
                pool.pool.reset()


def mapped_layers(items: Iterable[Item]) -> list[Layer]:
    """The expert layers of which every weight that left the GPU lies in mapped memory, in the order of `items`."""
    owners: dict[int, list[Item]] = {}
    for item in items:
        if item.experts and item.out:
            owners.setdefault(id(item.owner), []).append(item)
    found = []
    for ours in owners.values():
        leaf = {id(p): name for name, p in ours[0].owner._parameters.items()}
        if all(item.mapped for item in ours):
            weights = {leaf[id(item.parameter)]: item.host for item in ours if item.host is not None}
            found.append(Layer(ours[0].name.rpartition(".")[0], ours[0].owner, weights))
    return found


def unfit(module: nn.Module) -> str | None:
    """Why the expert layer `module` can have no pool, in words; None when it can."""
    method: Any = module.quant_method
    if getattr(method, "is_monolithic", False):
        return "its kernel routes and computes in one, so experts cannot be renumbered between"
    if getattr(module, "expert_map", None) is not None:
        return "its experts are spread over ranks"
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    if type(experts).__name__ not in READS_EXPERT_MAP:
        return f"{type(experts).__name__} is not known to skip experts that are elsewhere"
    try:
        bytes_per_slot(module)
    except NoTwin as why:
        return str(why)
    return None


def experts_of(module: nn.Module) -> int:
    """Rows of the layer's weights."""
    return next(p.shape[0] for name, p in _tensors(module) if roles.may_leave(module, name, p.dim()))


def bytes_per_slot(module: nn.Module) -> int:
    """Bytes of all that an expert of the layer `module` brings into a slot."""
    total = 0

    def count(source: torch.Tensor) -> None:
        nonlocal total
        total += row_bytes(source)

    _twin(module, Rows(experts_of(module), 1, count))
    return total


def pooled(module: nn.Module, slots: int, rows: torch.Tensor, counters: torch.Tensor) -> Pooled:
    """Slots for the layer `module`, on the device of its scales, and what runs it from them."""
    from .pool import Part, Pool

    tensors = Rows(experts_of(module), min(slots, experts_of(module)), lambda t: slots_for(t, min(slots, len(t))))
    view, twin = _twin(module, tensors)
    linked = {p.untyped_storage().data_ptr() for name, p in _tensors(module) if roles.may_leave(module, name, p.dim())}
    parts = [Part(real, made, real.untyped_storage().data_ptr() in linked) for real, made in tensors.pairs]
    pool = Pool(parts, counters=counters)
    alone = dict.fromkeys(("global_num_experts", "local_num_experts"), pool.slots)
    part = View(view, {"expert_map": pool.expert_map})
    rest = View(module, {"expert_map": pool.rest_map})
    return Pooled(module.quant_method, pool, twin, View(view, alone), part, rest, rows)


def _twin(module: nn.Module, tensors: Rows) -> tuple[View, Any]:
    view = View(module, dict(tensors.named(_tensors(module))))
    return view, twin_of(module.quant_method, tensors, module, view)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters of an expert layer that have a role."""
    method = roles.method_of(module)
    assert method is not None
    return [(n, p) for n, p in module._parameters.items() if p is not None and roles.role_of(method, n) is not None]
