"""What the lessons train on: text that every machine has, a language of known entropy, and batches indexed by step."""
from dtlab.data.batches import batches, epoch_order, shard_batch
from dtlab.data.synthetic import SyntheticLanguage
from dtlab.data.text import text_bytes

__all__ = ["text_bytes", "batches", "shard_batch", "epoch_order", "SyntheticLanguage"]
