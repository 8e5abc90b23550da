# SPDX-License-Identifier: Apache-2.0
"""The model runners of the release on the path, the default one first. Tests are collected without importing it."""

from __future__ import annotations

from importlib import metadata

V2_BY_DEFAULT = (0, 32)  # before it, V2 is taken for few models, and hybrid ones are refused


def runners() -> list[str]:
    """["v2", "v1"] where models run V2 unless told otherwise, else ["v1"]."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:  # every test is skipped
        return ["v2", "v1"]
    return ["v2", "v1"] if tuple(int(n) for n in version.split(".")[:2]) >= V2_BY_DEFAULT else ["v1"]
