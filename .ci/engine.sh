#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A Docker engine with buildx and Compose for one command, on a machine that may have none:
#
#   .ci/engine.sh [--optional] COMMAND [ARGUMENTS]
#
# An engine that answers is used as it is. Otherwise, as root on Debian: install what is missing, start dockerd, run the
# command, and end that dockerd. Debian 12 has no Compose v2, so its packages come out of the release after it, from
# whatever server this machine is set to use; all else stays as it is, by a low priority.
#
# With --optional, where no engine can be had or the one that answers runs no container, a line says why and the command
# runs without: its tests find no engine and skip.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
next=trixie
sources=/etc/apt/sources.list.d
optional=
if [ "${1:-}" = --optional ]; then
    optional=1
    shift
fi
why=  # there is no engine; the functions below set it, and run without `set -e`, as conditions

install_engine() {
    export DEBIAN_FRONTEND=noninteractive
    local packages=(docker.io docker-cli docker-buildx docker-compose) log
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
    if ! log=$(apt-get update -q 2>&1 && apt-get install -y -q --no-install-recommends "${packages[@]}" iptables 2>&1); then
        why="Docker was not installed (apt-get install ${packages[*]}): $(tail -1 <<<"$log")"
        return 1
    fi
}

start() {
    docker info >/dev/null 2>&1 && return
    if [ "$(id -u)" != 0 ]; then
        why="no Docker engine answers, and only root can start one: start it, or run this as root"
        return 1
    fi
    if ! command -v dockerd >/dev/null || ! docker buildx version >/dev/null 2>&1 || ! docker compose version >/dev/null 2>&1; then
        if ! command -v apt-get >/dev/null; then
            why="no Docker engine answers, and one is installed from Debian's packages alone: install and start it"
            return 1
        fi
        install_engine || return 1
    fi
    docker info >/dev/null 2>&1 && return  # a system's own manager may have started what was installed
    work=$(mktemp -d)
    trap finish EXIT
    # Its own number file, in its own folder: one left behind by a killed engine would stop this one.
    # A session of its own, so that Ctrl-C reaches the command first. The hook lets it grant a GPU that is not there.
    PATH="$root/tests/compose/hooks:$PATH" setsid dockerd --pidfile "$work/pid" >"$work/log" 2>&1 </dev/null &
    for _ in $(seq 240); do  # a minute, or until it has ended
        docker info >/dev/null 2>&1 && return
        kill -0 $! 2>/dev/null || break
        sleep 0.25
    done
    why="dockerd does not answer; its last words: $(tail -3 "$work/log")"
    return 1
}

finish() {
    # What a command has left is gigabytes, and no later one can use it: every base is another one.
    if [ -z "$why" ]; then
        { docker image prune -f && docker builder prune -af; } >/dev/null 2>&1 || true
    fi
    if pid=$(cat "$work/pid" 2>/dev/null) && kill "$pid" 2>/dev/null; then
        for _ in $(seq 120); do kill -0 "$pid" 2>/dev/null || break; sleep 0.25; done
    fi
    rm -rf "$work"
}

runs() {  # in a container and in a build: an engine may answer on a kernel that lets it do neither
    local tag=vllm-offload-test/probe said
    # shellcheck disable=SC2046  # none of these names has a space
    if ! said=$({
        tar -C / -chf - $(ldd /bin/true | grep -o '/[^ ]*') /bin/true 2>/dev/null | docker import - "$tag" \
            && docker run --rm "$tag" /bin/true \
            && printf 'FROM %s\nRUN ["/bin/true"]\n' "$tag" | docker buildx build --quiet -
    } 2>&1); then
        why="an engine answers, and runs no container: $(tail -1 <<<"$said")"
    fi
    docker image rm -f "$tag" >/dev/null 2>&1
    [ -z "$why" ]
}

if ! start || ! runs; then
    echo "engine: $why" >&2
    [ -n "$optional" ] || exit 1
    echo "engine: going on without: what needs an engine is skipped" >&2
    export DOCKER_HOST=unix:///nonexistent/no-engine
fi
"$@"
