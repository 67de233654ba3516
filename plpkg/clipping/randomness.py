"""Noise and Poisson samples, from a seed or from the operating system's entropy.

Everything drawn belongs to a numbered draw, so that a run that was killed goes on with the same numbers. Whoever knows
the seed can take the noise off again: a seed is for experiments, ``secure`` is for releases. Then the numbers come from
ChaCha20 under a key that is never stored, and each noise value is half the sum of four normal ones, whose last bits do
not tell the value without noise (Mironov, CCS 2012; Holohan & Braghin, arXiv 2107.10138).
"""

import hashlib
import secrets

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms


class Randomness:
    """A source of noise and samples.

    Parameters
    ----------
    seed
        For draws that can be repeated; ``None`` takes one from the operating system.
    secure
        ChaCha20 instead of PyTorch's generators. Excludes a seed.

    Raises
    ------
    ValueError
        A seed and ``secure``.
    """

    def __init__(self, seed: int | None = None, *, secure: bool = False) -> None:
        if secure and seed is not None:
            raise ValueError(f"secure=True takes no seed, got seed={seed!r}: noise that can be repeated can be removed")
        self.secure = secure
        self._seed = secrets.randbits(128) if seed is None else seed
        self._stream = Cipher(algorithms.ChaCha20(secrets.token_bytes(32), bytes(16)), mode=None).encryptor()

    def noise(self, like: dict[str, torch.Tensor], std: float, draw: int) -> dict[str, torch.Tensor]:
        """Normal numbers of a standard deviation, in each tensor's shape."""
        if self.secure:
            return {name: std * self._normal(tensor.shape).to(tensor) for name, tensor in like.items()}
        device = next(iter(like.values())).device
        generator = self._generator("noise", draw, device)
        return {
            name: torch.randn(tensor.shape, generator=generator, device=device, dtype=tensor.dtype) * std
            for name, tensor in like.items()
        }

    def sample(self, size: int, rate: float, draw: int) -> list[int]:
        """Which of ``size`` are taken, each with probability ``rate``, independently."""
        if self.secure:
            taken = torch.from_numpy(self._uniform(size)) < rate
        else:
            taken = torch.rand(size, generator=self._generator("sample", draw), dtype=torch.float64) < rate
        return taken.nonzero().flatten().tolist()

    def _generator(self, purpose: str, draw: int, device="cpu") -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed} {purpose} {draw}".encode()).digest()
        return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little"))

    def _uniform(self, count: int) -> np.ndarray:
        """Numbers in [0, 1) with 53 bits."""
        words = np.frombuffer(self._stream.update(bytes(8 * count)), dtype=np.uint64)
        return (words >> np.uint64(11)) * 2.0**-53

    def _normal(self, shape: torch.Size) -> torch.Tensor:
        count = shape.numel()
        radius = np.sqrt(-2 * np.log1p(-self._uniform(4 * count)))  # Box and Muller; 1 − u is never 0
        parts = radius * np.cos(2 * np.pi * self._uniform(4 * count))
        return torch.from_numpy(parts.reshape(4, count).sum(0) / 2).reshape(shape)
