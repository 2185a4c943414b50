"""Tar shards: `ShardDataset` reads samples by number, `ShardStream` in sequence, also from other people's WebDataset tars."""

from loaders.stream import ShardStream
from loaders.tarset import ShardDataset

__all__ = ["ShardDataset", "ShardStream"]
