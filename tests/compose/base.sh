#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tests/compose/base.sh TAG: a base image for docker/cpu where no registry can be reached, made of this Debian 12's own
# packages. It stands in for debian:bookworm-slim with what docker/cpu/Dockerfile installs there.
set -euo pipefail
tag=${1:?tag}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
packages=(base-files base-passwd bash coreutils dash debianutils diffutils findutils grep gzip hostname libc-bin libc6
    sed tar util-linux mawk perl-base ca-certificates netbase login libssl3 libffi8 libsqlite3-0 zlib1g libbz2-1.0
    liblzma5 libreadline8 libexpat1 libuuid1 libtinfo6 libncursesw6 libstdc++6 libgcc-s1 libgomp1 libnsl2 libtirpc3
    libdb5.3 libcrypt1 libgssapi-krb5-2 media-types tzdata passwd libpam0g libaudit1 libselinux1 libsemanage2 libnuma1
    libtcmalloc-minimal4 python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)

files() { # of every package that this machine has
    for package in "${packages[@]}"; do dpkg -L "$package" 2>/dev/null || true; done | grep '^/'
}

libraries() { # that their programs and modules link
    { files | grep -E '^/(usr/)?s?bin/.'; files | grep '/lib-dynload/.*\.so$'; } |
        { xargs -r ldd 2>/dev/null || true; } | awk '$3 ~ /^\// {print $3}'
}

mkdir -p "$root"/usr/{bin,sbin,lib,lib64,local/bin}
for folder in bin sbin lib lib64; do ln -s "usr/$folder" "$root/$folder"; done
{
    files | grep -vE '^/usr/share/(doc|man|locale|info|lintian)/|^/(bin|sbin|lib|lib64)$'
    libraries | while read -r file; do
        echo "$file"
        readlink -f "$file"
    done
} | sort -u | while read -r file; do
    if [ -f "$file" ] || [ -L "$file" ]; then echo "$file"; fi
done | tar -C / -cf - --no-recursion --hard-dereference -T - 2>/dev/null |
    tar -C "$root" --keep-directory-symlink -xf -
mkdir -p "$root"/{proc,sys,dev,tmp,root,run,var/tmp,etc}
chmod 1777 "$root/tmp" "$root/var/tmp"
printf 'root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n' >"$root/etc/passwd"
printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"
chroot "$root" ldconfig
tar -C "$root" -cf - . | docker import \
    --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' --change 'CMD ["bash"]' - "$tag"
