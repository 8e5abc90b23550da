# SPDX-License-Identifier: Apache-2.0
"""The operations of torch that do to each expert of a layer what they do to the others, and to none by another's bytes.

Tensors of all experts have them as dimension 0. An operation that is not listed here counts as one that mixes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

# Operations on all experts that do the same to each, whatever their arguments are.
_KEEPS_APART = {
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.lift_fresh.default,
    aten.view.dtype,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._to_copy.default,
    aten.bitwise_and.Scalar,
    aten.bitwise_or.Scalar,
    aten.bitwise_xor.Scalar,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.__lshift__.Scalar,
    aten.__rshift__.Scalar,
    aten.ge.Scalar,
    aten.gt.Scalar,
    aten.le.Scalar,
    aten.lt.Scalar,
}
# Element by element, with a number or with a tensor of all experts and as many dimensions.
BY_ELEMENT = {
    aten.add.Tensor,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor,
    aten.div.Tensor,
    aten.mul.Tensor,
    aten.sub.Tensor,
}
# Those that do when they leave dimension 0 alone, and where their arguments name the dimensions.
_ALONG = {
    aten.cat.default: 1,
    aten.flip.default: 1,
    aten.index_select.default: 1,
    aten.select.int: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.squeeze.dim: 1,
    aten.stack.default: 1,
    aten.unsqueeze.default: 1,
}
# Those that are given a whole shape, and which argument that is; its first number is that of the experts.
SHAPED = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.expand.default: 1,
    aten.new_empty.default: 1,
    aten.new_zeros.default: 1,
}
EMPTY = (aten.empty.memory_format, aten.zeros.default)


def keeps_apart(function: Callable[..., Any], args: tuple[Any, ...], dimensions: set[int]) -> bool:
    """Whether `function` on tensors of all experts keeps them apart; `dimensions`: how many those tensors have each."""
    if function in _KEEPS_APART or (function in BY_ELEMENT and len(dimensions) == 1):
        return True
    first = args[0][0] if args and isinstance(args[0], (list, tuple)) else args[0] if args else None
    if not isinstance(first, torch.Tensor):
        return False
    if function in _ALONG:
        where = _ALONG[function]
        named = args[where] if len(args) > where else 0
        wide = first.dim() + (function in (aten.unsqueeze.default, aten.stack.default))
        return all(d % wide != 0 for d in (named if isinstance(named, (list, tuple)) else [named]))
    if function is aten.transpose.int:
        return all(d % first.dim() != 0 for d in args[1:3])
    if function is aten.permute.default:
        return args[1][0] % first.dim() == 0
    return function is aten.constant_pad_nd.default and len(args[1]) // 2 < first.dim()
