"""Residual: low-rank residual transmission between a device and the cloud (notebook 02)."""

from plpkg.residual.adapter import PrivateLoraConfig, convert_to_lora
from plpkg.residual.split import CloudPart, DevicePart, split

__all__ = ["CloudPart", "DevicePart", "PrivateLoraConfig", "convert_to_lora", "split"]
