#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A Docker engine with buildx and Compose for one command, on a machine that may have none:
#
#   .ci/engine.sh COMMAND [ARGUMENTS]
#
# An engine that answers is used as it is. Otherwise, as root on Debian: install what is missing, start dockerd, run the
# command, and end that dockerd. Debian 12 has no Compose v2, so its packages come out of the release after it, from
# whatever server this machine is set to use; all else stays as it is, by a low priority.
set -euo pipefail
next=trixie
sources=/etc/apt/sources.list.d

install_engine() {
    export DEBIAN_FRONTEND=noninteractive
    local packages=(docker.io docker-cli docker-buildx docker-compose)
    # shellcheck source=/dev/null
    if [ "$(. /etc/os-release && echo "${VERSION_ID:-}")" = 12 ]; then
        # The first entry that this machine has, with the suite exchanged.
        if [ -f "$sources/debian.sources" ]; then
            sed -e '/^$/,$d' -e "s/^Suites:.*/Suites: $next/" "$sources/debian.sources" >"$sources/vllm-offload.sources"
        else
            sed -n "s/^\(deb .*\) [a-z]* main.*/\1 $next main/p" /etc/apt/sources.list | head -1 >"$sources/vllm-offload.list"
        fi
        printf 'Package: *\nPin: release n=%s\nPin-Priority: 100\n' "$next" >/etc/apt/preferences.d/vllm-offload
        packages=("${packages[@]/%//$next}")
    fi
    apt-get update -q >/dev/null
    apt-get install -y -q --no-install-recommends "${packages[@]}" iptables >/dev/null
}

if ! docker info >/dev/null 2>&1; then
    if [ "$(id -u)" != 0 ]; then
        echo "engine: no Docker engine answers, and only root can start one: start it, or run this as root" >&2
        exit 1
    fi
    if ! command -v dockerd >/dev/null || ! docker buildx version >/dev/null 2>&1 || ! docker compose version >/dev/null 2>&1; then
        install_engine
    fi
fi
if ! docker info >/dev/null 2>&1; then  # a system's own manager may have started what was installed
    work=$(mktemp -d)
    # Its own number file, in its own folder: one left behind by a killed engine would stop this one.
    # A session of its own, so that Ctrl-C reaches the command first.
    setsid dockerd --pidfile "$work/pid" >"$work/log" 2>&1 </dev/null &
    finish() {
        if pid=$(cat "$work/pid" 2>/dev/null) && kill "$pid" 2>/dev/null; then
            for _ in $(seq 120); do kill -0 "$pid" 2>/dev/null || break; sleep 0.25; done
        fi
        rm -rf "$work"
    }
    trap finish EXIT
    for _ in $(seq 240); do  # a minute
        if docker info >/dev/null 2>&1; then break; fi
        sleep 0.25
    done
    if ! docker info >/dev/null 2>&1; then
        echo "engine: dockerd did not answer within a minute; its last words:" >&2
        tail -20 "$work/log" >&2
        exit 1
    fi
fi
"$@"
