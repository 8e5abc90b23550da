# SPDX-License-Identifier: Apache-2.0
"""Tokens of one engine before it sleeps and after it woke. In a process of its own, since sleep's allocator is one's.

python3 sleeper.py MODEL {resident,mapped,pageable} {v1,v2} OUT.json
"""

from __future__ import annotations

import contextlib
import json
import sys

import harness
import torch

PROBES = ((torch.cuda, "mem_get_info"), (torch.accelerator, "get_memory_info"))


@contextlib.contextmanager
def alone():
    """A release asserts that memory is free after it; what other processes took meanwhile must not count."""
    seen = torch.cuda.mem_get_info()
    kept = [(m, name, getattr(m, name)) for m, name in PROBES if hasattr(m, name)]
    for module, name, _ in kept:
        setattr(module, name, lambda *_: seen)
    try:
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def main(model: str, memory: str, runner: str, out: str) -> None:
    offload = {} if memory == "resident" else dict(cpu_offload_gb=8.0, cpu_offload_params={"experts"})
    kind = "mapped" if memory == "resident" else memory
    # The graphs that pageable memory leaves, for all kinds: full ones would round attention otherwise.
    settings = dict(mode="piecewise", load_format="auto", enable_sleep_mode=True)
    run = harness.start(model, memory=kind, v2=runner == "v2", **settings, **offload)
    assert run.v2 is (runner == "v2")
    found = {"before": run.tokens}
    for level in (1, 2):
        with alone():
            run.llm.sleep(level=level)
        assert run.llm.llm_engine.is_sleeping()
        if level == 1:
            run.llm.wake_up()
        else:  # as the releases document it: weights are gone, and read once more
            run.llm.wake_up(tags=["weights"])
            run.llm.collective_rpc("reload_weights")
            run.llm.wake_up(tags=["kv_cache"])
        found[f"level {level}"] = run.generate()
    if offload:
        found["moved"] = run.offloader.moved
        run.swap_two_experts()
        found["swapped"] = run.generate()
    with open(out, "w") as f:
        json.dump(found, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
