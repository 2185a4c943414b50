"""What feeds a device: batches copied ahead of their use, and data sets that live on it as a whole."""

from __future__ import annotations

from loaders.prefetch import DevicePrefetcher
from loaders.resident import DeviceDataset, Fit

__all__ = ["DeviceDataset", "DevicePrefetcher", "Fit"]
