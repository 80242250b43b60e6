"""Ways to damage a file: bits, cuts, splices, other kinds of files, huge numbers, deep nesting, other JSON values."""

import json
import random
import re
import struct
from typing import Any

ODD_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**12, 10**400, 1.5, float("nan"), float("inf"), -0.0, 1e308,
    "", "x", "../../x", "/etc/passwd", "\0", "\ud800", "x" * 10_000, "é" * 50, [], {}, [[]], [1, 2], {"a": 1}, [None],
]  # fmt: skip
OTHER_KINDS = [
    b"", b"\0" * 64, b"{}", b"[]", b"null", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"PK\x03\x04", b"%!PS-Adobe",
    b"\x80\x04K\x01.", b"[" * 200_000, b'{"a":' * 100_000, b"9" * 100_000, struct.pack("<Q", 2**63) + b"{}",
    struct.pack("<Q", 2) + b"{}", b"\xef\xbb\xbf{}", b"\xff\xfe{\0}\0", b"&a [*a, *a]", b"GIF89a\xff\xff\xff\xff",
]  # fmt: skip


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Other bytes than `content`, one to three damages away from it."""
    found = content
    for _ in range(chance.choice([1, 1, 2, 3])):
        found = chance.choice(DAMAGES)(found, chance)
    return found


def _place(content: bytes, chance: random.Random) -> int:
    # Headers stand at the beginning, directories of archives at the end.
    first, last = chance.choice([(0.0, 1.0), (0.0, 0.05), (0.9, 1.0)])
    return int(chance.uniform(first, last) * len(content))


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 3, 20]) if content else 0):
        changed[min(_place(content, chance), len(content) - 1)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    start = _place(content, chance)
    return content[:start] + content[start + chance.choice([1, 4, 100, len(content)]) :]


def insert(content: bytes, chance: random.Random) -> bytes:
    start, count = _place(content, chance), chance.choice([1, 4, 100])
    piece = chance.choice([chance.randbytes(count), b"\0" * count, b"\xff" * count, b"[" * 100_000, b"9" * count])
    return content[:start] + piece + content[start:]


def splice(content: bytes, chance: random.Random) -> bytes:
    start, source, count = _place(content, chance), _place(content, chance), chance.choice([1, 8, 200])
    return content[:start] + content[source : source + count] + content[start + count :]


def other_kind(content: bytes, chance: random.Random) -> bytes:
    other = chance.choice(OTHER_KINDS)
    return chance.choice([other, other + content, other + content[len(other) :]])


def huge_number(content: bytes, chance: random.Random) -> bytes:
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?", content[:100_000]))
    if not numbers:
        return flip(content, chance)
    found = chance.choice(numbers)
    number = chance.choice([b"-1", b"0", b"4294967296", b"1e400", b"1" * 30, b"9" * 5000, b"0.5", b"-0", b"NaN"])
    return content[: found.start()] + number + content[found.end() :]


def other_value(content: bytes, chance: random.Random) -> bytes:
    """Another value in a JSON file or in a safetensors file's header, or one entry less or more."""
    try:
        end = 8 + struct.unpack("<Q", content[:8])[0] if content[8:9] == b"{" else None
        root = json.loads(content if end is None else content[8:end])
    except (ValueError, struct.error, RecursionError):
        return flip(content, chance)
    inner: Any = root
    while isinstance(inner, (dict, list)) and inner:
        key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], (dict, list)) or not inner[key] or chance.random() < 0.3:
            what = chance.random()
            if what < 0.15:
                del inner[key]
            elif what < 0.25 and isinstance(inner, dict):
                inner[str(chance.choice(ODD_VALUES))] = inner[key]
            elif what < 0.35 and isinstance(inner, list):
                inner.append(inner[key])
            else:
                inner[key] = chance.choice(ODD_VALUES)
            break
        inner = inner[key]
    text = json.dumps(root).encode("utf-8", "replace")
    return text if end is None else struct.pack("<Q", len(text)) + text + content[end:]


DAMAGES = [flip, cut, insert, splice, other_kind, huge_number, other_value, other_value]
