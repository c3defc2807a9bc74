"""The callback in real trainings, with either name of Lightning."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offmap
from offmap.errors import ConfigError
from offmap.integrations import lightning as integration
from offmap.integrations.lightning import PACKAGES, GuardCallback

pytestmark = [  # Lightning's own, about torch and about small loaders
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


@pytest.fixture(params=PACKAGES)
def pl(request):
    return pytest.importorskip(PACKAGES[request.param], reason=f"needs {request.param}: pip install {request.param}")


def sample(rows: int, seed: int) -> TensorDataset:
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def module_of(pl) -> nn.Module:
    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, _, dataloader_idx=0):
            self.log("valid_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.02)

    torch.manual_seed(0)
    return Classifier()


def test_the_guard_is_fitted_evaluated_logged_and_saved(pl, tmp_path):
    loggers = importlib.import_module(f"{pl.__name__}.loggers")
    ood = {"far": TensorDataset(sample(64, 3).tensors[0] + 8), "labelled": DataLoader(sample(64, 2), batch_size=32)}
    options = {"solver": "closed-form", "draws": 8, "score": "distance"}
    callback = GuardCallback(ood, test=sample(100, 4), path=tmp_path / "guard.safetensors", **options)
    module, log = module_of(pl), loggers.CSVLogger(tmp_path)
    trainer = pl.Trainer(max_epochs=15, callbacks=[callback], logger=log, default_root_dir=tmp_path, log_every_n_steps=1, **QUIET)
    trainer.fit(module, DataLoader(sample(256, 0), batch_size=64, shuffle=True), DataLoader(sample(100, 1), batch_size=50))

    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = sample(20, 5).tensors[0]
    guard = offmap.load(tmp_path / "guard.safetensors", module)
    torch.testing.assert_close(guard.score(x), callback.guard.score(x))
    assert guard.score_module.name == "distance"
    assert all(torch.equal(weights[name], tensor) for name, tensor in module.state_dict().items())
    assert {row["set"] for row in callback.evaluation.rows} == {"test", "far", "labelled"}
    assert callback.metrics["offmap/far/auroc"] > 0.95
    assert callback.metrics["offmap/far/flagged"] > 0.8
    assert abs(callback.metrics["offmap/labelled/auroc"] - 0.5) < 0.2
    assert callback.metrics["offmap/test/flagged"] < 0.25
    with open(f"{log.log_dir}/metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["offmap/far/auroc"]]
    assert [int(row["step"]) for row in rows] == [trainer.global_step]
    assert float(rows[0]["offmap/far/auroc"]) == pytest.approx(callback.metrics["offmap/far/auroc"])


def test_without_validation_data_a_part_of_the_net_is_guarded_by_a_split(pl, tmp_path, caplog):
    callback = GuardCallback(model=lambda module: module.net, solver="closed-form", draws=8)
    module = module_of(pl)
    module.validation_step = None
    trainer = pl.Trainer(max_epochs=2, callbacks=[callback], logger=False, default_root_dir=tmp_path, **QUIET)
    trainer.fit(module, DataLoader(sample(200, 0), batch_size=50))
    assert "No validation data: 20 rows of `train`, which the model has seen, set the threshold" in caplog.text
    assert callback.evaluation is None
    assert set(dict(callback.guard.predictive.q.raw_scale.items())) == set(dict(module.net.named_parameters()))


def test_data_that_cannot_be_used_are_named_before_the_first_step(pl, tmp_path):
    options = {"max_epochs": 1, "logger": False, "default_root_dir": tmp_path, **QUIET}
    loader, module = DataLoader(sample(40, 0), batch_size=20), module_of(pl)
    before = module.net[0].weight.clone()
    with pytest.raises(ConfigError, match="one DataLoader for `valid`, but it has list of 2. Pass `valid=`"):
        pl.Trainer(callbacks=[GuardCallback()], **options).fit(module, loader, [loader, loader])
    module.validation_step = None
    with pytest.raises(ConfigError, match="Expected in-distribution data to compare `ood` with: pass `test=`"):
        pl.Trainer(callbacks=[GuardCallback({"far": sample(9, 1)})], **options).fit(module, loader)
    assert torch.equal(module.net[0].weight, before)


def test_without_lightning_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(integration, "Callback", object)
    with pytest.raises(ConfigError) as error:
        GuardCallback()
    assert str(error.value) == "lightning is needed here and is not installed: pip install 'offmap[lightning]'"


def test_offmap_itself_imports_neither_lightning_nor_scikit_learn():
    code = "import sys, offmap, offmap.cli; print([m for m in ('lightning', 'pytorch_lightning', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
