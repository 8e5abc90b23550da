# SPDX-License-Identifier: Apache-2.0
"""ELF files with GPU code, written byte by byte as nvcc lays them out: for what no release's wheel holds."""

import struct

PTX, SASS = 1, 2
ONE_GPU, FAMILY, LZ4, ZSTD = 0x100000, 0x200000, 0x2000, 0x8000


def entry(kind: int, arch: int, flags: int = 0, payload: bytes = b"\x01" * 40) -> bytes:
    out = bytearray(64)
    struct.pack_into("<HHIQ", out, 0, kind, 0x101, len(out), len(payload))
    struct.pack_into("<I", out, 28, arch)
    struct.pack_into("<Q", out, 40, 0x11 | flags)
    return bytes(out) + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    whole = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    return whole + b"\0" * (-len(whole) % 8)


def library(*containers: bytes, section: str = ".nv_fatbin") -> bytes:
    """An ELF file with one section of GPU code and the table of names."""
    code = b"".join(containers)
    names = b"\0" + section.encode() + b"\0.shstrtab\0"
    code_at = 64
    names_at = code_at + len(code)
    table = (names_at + len(names) + 7) // 8 * 8
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    sections = [
        struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, code_at, len(code), 0, 0, 8, 0),
        struct.pack("<IIQQQQIIQQ", len(section) + 2, 3, 0, 0, names_at, len(names), 0, 0, 1, 0),
    ]
    return (head + code + names).ljust(table, b"\0") + b"".join(sections)
