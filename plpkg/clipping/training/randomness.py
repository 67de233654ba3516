"""Noise and Poisson samples, from a seed or from the operating system's entropy.

Everything drawn belongs to a numbered draw, so that a run that was killed goes on with the same numbers. Whoever knows
the seed can take the noise off again: a seed is for experiments, ``secure`` is for releases. Then the numbers come from
ChaCha20 under a key that is never stored, and each noise value is half the sum of four normal ones, whose last bits do
not tell the value without noise (Mironov, CCS 2012; Holohan & Braghin, arXiv 2107.10138). Otherwise they come from
Philox under a key of 128 bits: PyTorch's CPU generator takes 32 bits of a seed, which can be tried out.
"""

import hashlib
import secrets

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from plpkg.validation import whole_number


class Randomness:
    """A source of noise and samples.

    Parameters
    ----------
    seed
        For draws that can be repeated; ``None`` takes one from the operating system.
    secure
        ChaCha20 instead of Philox. Excludes a seed.

    Raises
    ------
    ValueError
        A seed and ``secure``, or a seed that is not a whole number.
    """

    def __init__(self, seed: int | None = None, *, secure: bool = False) -> None:
        if secure and seed is not None:
            raise ValueError(f"secure=True takes no seed, got seed={seed!r}: noise that can be repeated can be removed")
        self.secure = secure
        self._seed = secrets.randbits(128) if seed is None else whole_number("seed", seed, 0)
        self._stream = Cipher(algorithms.ChaCha20(secrets.token_bytes(32), bytes(16)), mode=None).encryptor()

    def noise(self, like: dict[str, torch.Tensor], std: float, draw: int) -> dict[str, torch.Tensor]:
        """Normal numbers of a standard deviation, in each tensor's shape, at least float32."""
        generator = self._generator("noise", draw)
        noise = {}
        for name, tensor in like.items():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            if self.secure:
                drawn = self._normal(tensor.shape)
            else:
                exact = np.float64 if wide is torch.float64 else np.float32
                drawn = torch.from_numpy(np.asarray(generator.standard_normal(tuple(tensor.shape), dtype=exact)))
            noise[name] = (std * drawn).to(tensor.device, wide)
        return noise

    def sample(self, size: int, rate: float, draw: int) -> list[int]:
        """Which of ``size`` are taken, each with probability ``rate``, independently."""
        uniform = self._uniform(size) if self.secure else self._generator("sample", draw).random(size)
        return np.flatnonzero(uniform < rate).tolist()

    def _generator(self, purpose: str, draw: int) -> np.random.Generator:
        digest = hashlib.sha256(f"{self._seed} {purpose} {draw}".encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))

    def _uniform(self, count: int) -> np.ndarray:
        """Numbers in [0, 1) with 53 bits."""
        words = np.frombuffer(self._stream.update(bytes(8 * count)), dtype=np.uint64)
        return (words >> np.uint64(11)) * 2.0**-53

    def _normal(self, shape: torch.Size) -> torch.Tensor:
        count = shape.numel()
        radius = np.sqrt(-2 * np.log1p(-self._uniform(4 * count)))  # Box and Muller; 1 − u is never 0
        parts = radius * np.cos(2 * np.pi * self._uniform(4 * count))
        return torch.from_numpy(parts.reshape(4, count).sum(0) / 2).reshape(shape)
