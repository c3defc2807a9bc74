"""A user's data, whatever its form, as batches (inputs, targets) on the model's device and in its dtype.

Batches of a DataLoader may differ in length, as padded texts do. Validation data are held in memory as one batch, so there they
are padded to the longest: that takes an `attention_mask` among the inputs, by which the model knows padding.
"""

from offmap.data.batch import (
    Batch,
    Place,
    check_finite,
    check_inputs,
    collate,
    concat_padded,
    drop_targets,
    is_mapping,
    split_batch,
)  # fmt: skip
from offmap.data.batches import (
    Batches,
    Rows,
    Shard,
    Stream,
    all_gather_rows,
    as_batches,
    fork_rng,
    is_sharded,
    iter_batches,
    load_rows,
    load_train_valid,
    map_rows,
    sample_rows,
    split_data,
)  # fmt: skip

__all__ = [
    "Batch", "Batches", "Place", "Rows", "Shard", "Stream", "all_gather_rows", "as_batches", "check_finite", "check_inputs",
    "collate", "concat_padded", "drop_targets", "fork_rng", "is_mapping", "is_sharded", "iter_batches", "load_rows",
    "load_train_valid", "map_rows", "sample_rows", "split_batch", "split_data",
]  # fmt: skip
