"""Independent random streams from names: the same parts give the same seed in every process and on every machine."""

from __future__ import annotations

import hashlib

SEED_BITS = 53
"""Fits torch, NumPy and Gymnasium, and survives readers of JSON that hold numbers as doubles."""


def derive_seed(*parts: int | str) -> int:
    """A seed in `[0, 2**53)` from what names the stream, e.g. `derive_seed(run_seed, "train", draw, member, turn)`.

    Parts keep their type and borders: `("1", 2)`, `(1, 2)` and `(12,)` are three different streams.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{'s' if isinstance(part, str) else 'i'}{part}".encode()
        digest.update(len(text).to_bytes(4, "big") + text)
    return int.from_bytes(digest.digest(), "big") >> (64 - SEED_BITS)
