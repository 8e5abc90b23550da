#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the images that `patches/releases.toml` names: an official base of a pin, with the series applied.

    tools/images.py names [--release TAG] [--variant V] [--json]    what would be built, and on which base
    tools/images.py build [--release TAG] [--variant V] [--name NAME] [--base BASE] [--push]
                          [-- more arguments of docker buildx build]

Without --release: the newest pin that has the variant; without --variant: cu130 and sm86; `--release all`: every pin.
The result is NAME:TAG-VARIANT (NAME: vllm-offload), such as vllm-offload:v0.33.0-sm86. --push adds provenance and SBOM.

The third variant, slim, is for the GPUs before Hopper too, and comes only when it is named: it stands on a Python image
and the packages of docker/slim/TAG.txt, so its build needs a package index.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import vllm_offload as cli  # noqa: E402

VARIANTS = ("cu130", "sm86")  # children of an official image
SLIM = "slim"
SLIM_BASE = "python:3.12-slim-bookworm"  # as the Dockerfile has it, and the locks are for; a test compares
# Pins without a slim image: why, and what to build instead. PyPI has one build of each release, for one CUDA.
NO_SLIM = {
    "v0.17.1": "no lock of its packages has been tried: --variant sm86",
    "v0.18.0": "no lock of its packages has been tried: --variant sm86",
    "v0.32.0": "it is the pin for drivers before R580, and the wheel on PyPI is built for CUDA 13: --variant sm86, or "
    "--release v0.26.0",
    "v0.33.0": "no lock of its packages has been tried: --variant sm86, or --release v0.26.0",
}


class Image(NamedTuple):
    release: str
    variant: str
    base: str  # name:tag, or name:tag@sha256:...

    def tag(self, name: str) -> str:
        return f"{name}:{self.release}-{self.variant}"


def chosen(release: str | None, variant: str | None) -> list[Image]:
    """The images that are asked for, in the order of the pins."""
    pins = cli.releases()
    if release not in (None, "", "all", *pins):
        raise cli.Refused(f"{release} is no pin; pins: {', '.join(pins)}")
    if variant == SLIM:
        return chosen_slim(release, [*pins])
    images = [
        Image(tag, v, entry["images"][v])
        for tag, entry in pins.items()
        for v in VARIANTS
        if v in entry.get("images", {})
        and v in (variant or v)
        and tag == (tag if release in (None, "", "all") else release)
    ]
    if not release:  # the newest of each variant
        images = list({image.variant: image for image in images}.values())
    if not images:
        have = ", ".join(tag for tag, entry in pins.items() if variant in entry.get("images", {})) or "none"
        raise cli.Refused(f"{release} names no {variant or 'image'} in patches/releases.toml; pins that do: {have}")
    return images


def chosen_slim(release: str | None, pins: list[str]) -> list[Image]:
    """The slim images that are asked for: of the pins that have a lock."""
    have = [tag for tag in pins if (ROOT / "docker" / "slim" / f"{tag}.txt").is_file()]
    if release in (None, ""):
        have = have[-1:]
    elif release != "all" and release not in have:
        why = NO_SLIM.get(release or "", "docker/slim has no lock of it: --variant sm86")
        raise cli.Refused(f"{release} has no slim image: {why}; pins that have one: {', '.join(have) or 'none'}")
    return [Image(tag, SLIM, SLIM_BASE) for tag in have if release in (None, "", "all", tag)]


def output(*command: str) -> str | None:
    """What a command prints; None when it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if not done.returncode else None


def resolve(base: str, registry: bool) -> tuple[str, str]:
    """(what FROM gets, the base's digest). A digest pins what a tag only names, which its owner can move.

    An image that is here already is used as it is, with the digest that it was pulled by, or its own id where it never
    was; a build that pushes takes the registry's word alone.
    """
    name, _, digest = base.partition("@")
    if digest:
        return base, digest
    if not registry and (found := output("docker", "image", "inspect", name)):
        local = json.loads(found)[0]
        pulled = [d.partition("@")[2] for d in local.get("RepoDigests") or []]
        return name, (pulled or [local["Id"]])[0]
    digest = output("docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", name) or ""
    if not digest.startswith("sha256:"):
        raise cli.Refused(
            f"the base {name} is neither here nor in a registry that can be reached: `docker pull {name}` says why"
        )
    return f"{name}@{digest}", digest


def source() -> str:
    """Where this checkout comes from, without a password."""
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and repository:
        return f"{server}/{repository}"
    url = output("git", "remote", "get-url", "origin") or ""
    return url if url.startswith("https://") and "@" not in url else ""


def build(image: Image, name: str, push: bool, more: list[str]) -> None:
    base, digest = resolve(image.base, registry=push)
    pin = cli.pin_for(cli.releases()[image.release]["version"])
    revision = output("git", "rev-parse", "HEAD") or ""
    if output("git", "status", "--porcelain"):
        revision += "-dirty" if revision else ""
    arguments = {
        "SLIM_BASE" if image.variant == SLIM else "BASE": base,
        "BASE_NAME": image.base.partition("@")[0],
        "BASE_DIGEST": digest,
        "RELEASE": image.release,
        "VARIANT": image.variant,
        "SERIES": pin.hash,
        "IMAGE_VERSION": f"{image.release}-{pin.hash}",
        "REVISION": revision,
        "SOURCE": source(),
    }
    command = ["docker", "buildx", "build", "--tag", image.tag(name)]
    command += [part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")]
    command += ["--push", "--provenance=mode=max", "--sbom=true"] if push else ["--load"]
    began = time.monotonic()
    print(f"{image.tag(name)}: on {base}, series {pin.hash}", flush=True)
    if subprocess.run([*command, *more, "."], cwd=ROOT).returncode:
        raise cli.Refused(f"{image.tag(name)} was not built: see the builder's words above")
    print(f"{image.tag(name)}: built in {time.monotonic() - began:.1f} s", flush=True)


def main() -> int:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["names", "build"])
    parser.add_argument("--release", metavar="TAG")
    parser.add_argument("--variant", choices=(*VARIANTS, SLIM))
    parser.add_argument("--name", default="vllm-offload")
    parser.add_argument("--json", action="store_true", help="names: as a list for a workflow's matrix")
    parser.add_argument("--base", help="instead of the one that patches/releases.toml names")
    parser.add_argument("--push", action="store_true")
    a = parser.parse_args(words[:cut])
    try:
        images = chosen(a.release, a.variant)
        if a.json and a.command == "names":
            print(json.dumps([image._asdict() for image in images]))
            return 0
        for image in images:
            image = image._replace(base=a.base or image.base)
            if a.command == "names":
                print(f"{image.tag(a.name)} {image.base}")
            else:
                build(image, a.name, a.push, words[cut + 1 :])
    except cli.Refused as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    except FileNotFoundError as error:
        print(f"images: {error.filename} is not installed: Docker Engine with buildx is needed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
