"""Read side: packed data to PyTorch. Import the module you need, for example ``from loaders.shards import ShardDataset``.

Empty on purpose: ``import loaders.format`` must load neither torch nor click.
"""
