"""A callback of `lightning` or `pytorch_lightning` that fits a guard when `Trainer.fit` ends, and logs metrics on OOD data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from offmap._types import Data
from offmap.errors import ConfigError
from offmap.evaluation import Evaluation, evaluate
from offmap.fit import fit
from offmap.guard import Guard

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}  # {distribution: module of Callback}


def callback_class() -> Any:
    """Return the Callback of the Lightning that is already imported, else of one that is installed, else `object`."""
    for package in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(PACKAGES[package]).Callback
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in PACKAGES:
                raise
    return object


Callback: Any = callback_class()


class GuardCallback(Callback):
    """Fit a guard at the end of `Trainer.fit`, evaluate it on OOD data and log `offmap/<set>/<metric>`.

    After the fit it holds the `guard`, the `evaluation` (None without `ood`) and the logged `metrics`. In several processes only
    the first one fits, on the batches of its own loaders; models that are sharded over devices cannot be guarded.

    Args:
        ood: OOD data by name: loaders, data sets, or tensors, with targets or without.
        train: Data to fit with; None: the trainer's training loader.
        valid: Data for τ, clip and threshold; None: the trainer's validation loader, or a tenth of `train` if there is none.
        test: In-distribution data that OOD data are compared with; None: `valid`, on which the threshold was set.
        model: Picks the model out of the LightningModule, such as `lambda module: module.encoder`; None: the module itself.
        path: Where to save the guard; None: nowhere.
        options: Further arguments of `offmap.fit`, such as `score="epistemic"` or `params="last-layer"`.
    """

    def __init__(
        self, ood: Mapping[str, Data] | None = None, *, train: Data | None = None, valid: Data | None = None,
        test: Data | None = None, model: Callable[[Any], nn.Module] | None = None, path: str | Path | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if Callback is object:
            raise ConfigError("lightning is needed here and is not installed: pip install 'offmap[lightning]'")
        super().__init__()
        self.ood: dict[str, Data] = dict(ood or {})
        self.train: Data | None = train
        self.valid: Data | None = valid
        self.test: Data | None = test
        self.model: Callable[[Any], nn.Module] | None = model
        self.path: str | Path | None = path
        self.options: dict[str, Any] = {"progress": False, "ranks": "alone"} | options
        self.guard: Guard | None = None
        self.evaluation: Evaluation | None = None
        self.metrics: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the data before hours of training."""
        self._data(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit, evaluate, log and save, in the first process only."""
        if not trainer.is_global_zero:
            return
        train, valid, test = self._data(trainer)
        model = pl_module if self.model is None else self.model(pl_module)
        self.guard = fit(model, train, valid, **self.options)
        if self.ood:
            self.evaluation = evaluate(self.guard, test, self.ood, target=self.options.get("target", "labels"))
            self.metrics = {
                f"offmap/{row['set']}/{key}": value
                for row in self.evaluation.rows for key, value in row.items() if key not in ("scorer", "set")
            }  # fmt: skip
            for name, scores in next(iter(self.evaluation.scores.values())).items():
                self.metrics[f"offmap/{name}/flagged"] = float((scores > self.guard.threshold).double().mean())
            for trainer_logger in trainer.loggers:
                trainer_logger.log_metrics(self.metrics, step=trainer.global_step)
                trainer_logger.save()
        if self.path is not None:
            self.guard.save(self.path)

    def _data(self, trainer: Any) -> tuple[Data, Data | None, Data | None]:
        """Return the data to fit, to validate and to compare with."""
        train = self.train if self.train is not None else _loader(trainer.train_dataloader, "train")
        loaders = trainer.val_dataloaders
        valid = self.valid if self.valid is not None or loaders is None else _loader(loaders, "valid")
        test = self.test if self.test is not None else valid
        if self.ood and test is None:
            raise ConfigError("Expected in-distribution data to compare `ood` with: pass `test=`, or give the trainer validation "
                              "data.")  # fmt: skip
        return train, valid, test


def _loader(loaders: Any, name: str) -> Any:
    """Return the one loader of a trainer."""
    several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    if isinstance(several, list | tuple) and len(several) == 1:
        several = several[0]
    if not isinstance(several, DataLoader):
        kind = type(loaders).__name__ + (f" of {len(several)}" if isinstance(several, list | tuple) else "")
        raise ConfigError(f"Expected the trainer to have one DataLoader for `{name}`, but it has {kind}. Pass `{name}=` to say "
                          "which data to use.")  # fmt: skip
    return several
