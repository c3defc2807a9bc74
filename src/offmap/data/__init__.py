"""A user's data, whatever its form, as re-iterable batches (inputs, targets) on the model's device and in its dtype.

Batches of a DataLoader may differ in length, as padded texts do. Validation data are held in memory as one batch, so there they
are padded to the longest: that takes an `attention_mask` among the inputs, by which the model knows padding.
"""

from offmap.data.batch import Batch, Place, check_finite, check_inputs, divide, is_mapping, unlabelled
from offmap.data.collate import join, lay
from offmap.data.gather import pooled, sample_together
from offmap.data.shard import Share, is_sharded
from offmap.data.streams import Batches, Rows, Stream, batches, gather, given, own_order, sample, split

__all__ = [
    "Batch", "Batches", "Place", "Rows", "Share", "Stream", "batches", "check_finite", "check_inputs", "divide", "gather",
    "given", "is_mapping", "is_sharded", "join", "lay", "own_order", "pooled", "sample", "sample_together", "split", "unlabelled",
]  # fmt: skip
