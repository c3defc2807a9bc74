"""A user's data, whatever its form, as batches (inputs, targets) on the model's device and in its dtype.

Batches of a DataLoader may differ in length, as padded texts do. Validation data are held in memory as one batch, so there they
are padded to the longest: that takes an `attention_mask` among the inputs, by which the model knows padding.
"""

from offmap.data.batch import Batch, Place, check_finite
from offmap.data.batches import Batches, Rows, Shard, as_batches, fork_rng, load_rows

__all__ = ["Batch", "Batches", "Place", "Rows", "Shard", "as_batches", "check_finite", "fork_rng", "load_rows"]
