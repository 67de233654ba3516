"""Noise and Poisson samples, from a seed or from the operating system's entropy.

Everything drawn belongs to a numbered draw in a numbered life, so that a run that was killed goes on with the same
numbers, and one that goes back never sees them again (:class:`plpkg.clipping.training.ledger.Ledger`). Whoever
knows the seed can take the noise off again: a seed is for experiments, ``secure`` is for releases. Then the numbers
come from ChaCha20 under a key that is never stored, and each noise value is half the sum of four normal ones, whose
last bits do not tell the value without noise (Mironov, CCS 2012; Holohan & Braghin, arXiv 2107.10138). Otherwise they
come from Philox under a key of 128 bits: PyTorch's CPU generator takes 32 bits of a seed, which can be tried out.
"""

import hashlib
import math
import os
import secrets

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from plpkg.validation import whole_number

BLOCK = 2**15
"""Numbers of noise at a time."""


class Randomness:
    """A source of noise and samples.

    Parameters
    ----------
    seed
        For draws that can be repeated; ``None`` takes one from the operating system.
    secure
        ChaCha20 instead of Philox. Excludes a seed.

    Attributes
    ----------
    life
        The number of the training's life.

    Raises
    ------
    ValueError
        A seed and ``secure``, or a seed that is not a whole number.
    """

    def __init__(self, seed: int | None = None, *, secure: bool = False) -> None:
        if secure and seed is not None:
            raise ValueError(f"secure=True takes no seed, got seed={seed!r}: noise that can be repeated can be removed")
        self.secure = secure
        self.life = 0
        self._seed = secrets.randbits(128) if seed is None else whole_number("seed", seed, 0)
        self._process = os.getpid()
        self._stream = Cipher(algorithms.ChaCha20(secrets.token_bytes(32), bytes(16)), mode=None).encryptor()

    def add_noise(self, sums: dict[str, torch.Tensor], std: float, draw: int) -> None:
        """Add normal numbers of a standard deviation to each tensor, in place; as many at a time as a cache holds."""
        generator = self._generator("noise", draw)
        for total in sums.values():
            for part in total.view(-1).split(BLOCK):
                if self.secure:
                    noise = self._normal(len(part)).to(part.device).mul_(std)
                    part.copy_(noise.add_(part))  # added up in float64, and rounded once
                else:
                    dtype = np.float64 if part.dtype is torch.float64 else np.float32
                    noise = torch.from_numpy(generator.standard_normal(len(part), dtype=dtype))
                    part.add_(noise.to(part), alpha=std)

    def sample(self, size: int, rate: float, draw: int) -> list[int]:
        """Which of ``size`` are taken, each with probability ``rate``, independently."""
        uniform = self._uniform(size).numpy() if self.secure else self._generator("sample", draw).random(size)
        return np.flatnonzero(uniform < rate).tolist()

    def seed_of(self, purpose: str, draw: int) -> int:
        """A seed for a generator of another kind, of 63 bits."""
        return int(self._generator(purpose, draw).integers(2**63))

    def _generator(self, purpose: str, draw: int) -> np.random.Generator:
        place = f"{self.life} {draw}" if self.life else draw
        return self._generated(f"{self._seed} {purpose} {place}")

    @staticmethod
    def _generated(key: str) -> np.random.Generator:
        digest = hashlib.sha256(key.encode()).digest()
        philox_key = int.from_bytes(digest[:16], "little")
        return np.random.Generator(np.random.Philox(key=philox_key))

    def _uniform(self, *shape: int) -> torch.Tensor:
        """Numbers in [0, 1) with 53 bits, float64."""
        if os.getpid() != self._process:
            raise RuntimeError("a process that was forked would draw the noise of the other: make_private again in it")
        zeros = bytes(8 * math.prod(shape))
        stream = self._stream.update(zeros)  # the cipher's own bits
        words = torch.frombuffer(bytearray(stream), dtype=torch.int64)
        return words.bitwise_and_(2**53 - 1).double().mul_(2.0**-53).view(shape)

    def _normal(self, count: int) -> torch.Tensor:
        """Half the sum of four normal numbers each, by Box and Muller: √(−2·ln(1 − u))·cos(2πv); 1 − u is never 0."""
        radius = self._uniform(4, count).neg_().log1p_().mul_(-2).sqrt_()
        cosine = self._uniform(4, count).mul_(2 * math.pi).cos_()
        normal = radius.mul_(cosine)
        return normal.sum(0).div_(2)
