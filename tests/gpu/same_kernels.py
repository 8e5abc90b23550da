# SPDX-License-Identifier: Apache-2.0
"""What a bundle's kernels need before a release's Python runs on them, and what makes two starts run the same ones."""

from __future__ import annotations

from pathlib import Path

import vllm


def on_newer_library() -> None:
    """v0.17.1 and v0.18.0 on the kernels of 0.20.2, which want global scales in float32, where they are bf16's."""
    import vllm._custom_ops as ops

    bundled = (Path(vllm.__file__).parent / "_C_stable_libtorch.abi3.so").exists()
    if not (bundled and vllm.__version__.startswith(("0.17.", "0.18."))) or hasattr(ops, "as_released"):
        return
    released = ops.as_released = ops.moe_wna16_marlin_gemm

    def widened(a, c, weight, bias, scales, a_scales, global_scale, *rest, **named):
        wide = None if global_scale is None else global_scale.float()
        return released(a, c, weight, bias, scales, a_scales, wide, *rest, **named)

    ops.moe_wna16_marlin_gemm = widened
    if vllm.__version__.startswith("0.17."):
        # The quantization to FP4 gives its results back in that library; a pattern that lets it write them is refused.
        import vllm.compilation.passes.fusion.act_quant_fusion as fusion

        fusion.silu_and_mul_nvfp4_quant_supported = False


def triton_prefill() -> dict[str, str]:
    """What asks for the gated delta net's prefill in Triton; v0.17.1 is not to be asked, and compiles one on SM90."""
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(EngineArgs, "gdn_prefill_backend"):
        return {"gdn_prefill_backend": "triton"}
    from vllm.model_executor.models.qwen3_next import ChunkGatedDeltaRule

    ChunkGatedDeltaRule.forward_cuda = ChunkGatedDeltaRule.forward_native
    return {}


def marlin() -> dict[str, str]:
    """What asks for Marlin where a release takes Humming before it on SM90: users' cards run Marlin, or FP4 kernels.

    By a file, since Humming's package may be missing and then its modules can't be imported.
    """
    prefers = Path(vllm.__file__).parent / "model_executor/layers/quantization/utils/humming/priority.py"
    return {"moe_backend": "marlin"} if prefers.exists() else {}


def first_configuration() -> None:
    """Have Triton's autotuner take the first configuration that the card can run, instead of timing them all.

    What is fastest by a hair differs from one process to the next, and configurations round differently: tokens of two
    starts would be compared that ran two kernels. To time the dozens of each gated delta net kernel takes minutes too.
    """
    from triton.runtime.autotuner import Autotuner

    if hasattr(Autotuner, "as_released"):
        return
    run, bench = Autotuner.as_released = Autotuner.run, Autotuner._bench

    def run_first(self, *args, **named):
        self.runs = False
        return run(self, *args, **named)

    def bench_first(self, *args, config, **named):
        timings = [float("inf")] * 3 if self.runs else bench(self, *args, config=config, **named)
        self.runs = self.runs or timings[0] != float("inf")
        return timings

    Autotuner.run, Autotuner._bench = run_first, bench_first
