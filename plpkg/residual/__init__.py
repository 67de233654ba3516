"""Residual: low-rank residual transmission between a device and the cloud (notebook 02)."""

from plpkg.residual.adapter import PrivateLoraConfig, convert_to_lora

__all__ = ["PrivateLoraConfig", "convert_to_lora"]
