"""What the processes of these tests do: each job runs alone in pytest, and in every rank that `torchrun` starts.

python tests/rank_jobs.py FOLDER JOB...    writes FOLDER/JOB-RANK.safetensors, and what was raised to FOLDER/JOB-RANK.txt
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offmap
from offmap.data import Place, as_batches
from offmap.distributed.group import join_group
from offmap.errors import ModelError, OffmapError
from offmap.maxwent.solve import feed_inputs
from offmap.model.params import stack_models
from offmap.posterior.basis import observe

Tensors = dict[str, Tensor]
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
OPTIONS: dict[str, Any] = {"risk_draws": 8, "draws": 8, "progress": False, "likelihood": "gaussian"}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Weights by hand: the same in every process."""
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    for i, p in enumerate(net.parameters()):
        p.data = (0.5 * normal(i, *p.shape)).to(dtype)
    return net


def rows(count: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs, and targets near what the net says."""
    x = normal(seed, count, 4).to(dtype)
    with torch.no_grad():
        return x, mlp(dtype)(x) + 0.1 * normal(seed + 1, count, 1).to(dtype)


def convolutions() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 6, 3), nn.Flatten(), nn.Linear(216, 3))
    for i, p in enumerate(net.parameters()):
        p.data = 0.3 * normal(i, *p.shape).float()
    return net


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = normal(seed, count, 2, 8, 8).float()
    return x, convolutions()(x).argmax(1)


def state(guard: offmap.Guard) -> Tensors:
    """Everything that a guard is made of; V is compared as V·diag(φ²)·Vᵀ too."""
    q = guard.predictive.q  # pyright: ignore[reportAttributeAccessIssue]
    found = {f"scale.{n}": s.detach() for n, s in q.scale().items()} | {f"rotation.{n}": v for n, v in q.rotation.items()}
    for name, v in q.rotation.items():
        if len(q.views[name].blocks) == 1 and v.shape[2] == 1:
            phi = q.views[name].rows(q.scale()[name].detach()).double().square()  # (M, out, D)
            found[f"covariance.{name}"] = torch.einsum("mik,mok,mjk->moij", v[:, 0, 0].double(), phi, v[:, 0, 0].double())
    score = {f"score.{n}": t for n, t in guard.score_module.state_dict().items()}
    return found | score | {"scores": guard.calibration.scores, "residuals": guard.calibration.residuals}


def fit_small(net: nn.Module, train: Any, valid: Any, **options: Any) -> Tensors:
    return state(offmap.fit(net, train, valid, **OPTIONS | options))


def moments() -> Tensors:
    """Σ h hᵀ by way of its bases: s, and V·diag(s²)·Vᵀ; more rows than are all counted, in several batches."""
    stacked, data = stack_models(convolutions()), as_batches(loader(), Place(torch.device("cpu"), torch.float32), name="train")
    with join_group() as group:
        dealt = feed_inputs(data, group)
        seen = observe(stacked, feed_inputs(data), rotated=True, group=group, shard=dealt)
    found: Tensors = {}
    for name, b in seen.bases.items():
        v = b.matrix
        assert v is not None
        found |= {f"s.{name}": b.input_rms, f"reach.{name}": b.output_rms, f"v.{name}": v}
        squares = b.input_rms.square().view(v.shape[:-1])
        found[f"moment.{name}"] = torch.einsum("mgnik,mgnk,mgnjk->mgnij", v.double(), squares, v.double())
    return found


def loader(shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*images(330, 3)), batch_size=32, shuffle=shuffle)


def own_half(data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of several processes each has some rows; one alone has them all."""
    return tuple(t.tensor_split(SIZE)[RANK] for t in data)


def by_sampler(train: tuple[Tensor, Tensor]) -> DataLoader[Any]:
    sampler = DistributedSampler(TensorDataset(*train), SIZE, RANK, shuffle=False)
    return DataLoader(sampler.dataset, batch_size=100, sampler=sampler)


def wrap_model(net: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net) if torch.distributed.is_initialized() else net


def other_rows() -> Tensors:
    x, y = rows(300)
    x[7, 1] += RANK  # rank 1 read another file
    return fit_small(mlp(), (x, y), rows(90, 11), solver="closed-form")


def one_fails() -> Tensors:
    def output_fn(output: Tensor) -> Tensor:
        if RANK == 1:
            raise KeyError("the disk of this rank is full")
        return output

    return fit_small(mlp(), rows(300), rows(90, 11), output_fn=output_fn)


def sharded_model(kind: str) -> Tensors:
    """A model whose parameters are divided among processes is refused; the remedy that the error names works."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    net, plain = mlp(), mlp()
    if kind == "fsdp":
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(net, mesh=init_device_mesh("cpu", (SIZE,)))
    remedy = re.escape("get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))")
    with pytest.raises(ModelError, match=remedy):
        offmap.fit(net, *TWO, **OPTIONS)
    for p in plain.parameters():
        nn.init.zeros_(p)
    plain.load_state_dict(get_model_state_dict(net, options=StateDictOptions(full_state_dict=True)))
    return fit_small(plain, *TWO, solver="closed-form")


TWO = rows(300), rows(90, 11)
FLOAT64 = torch.float64


def other_law(name: str) -> Tensors:
    """A law of weights beside the diagonal one."""
    data = rows(701, dtype=FLOAT64), rows(120, 11, FLOAT64)
    return fit_small(mlp(FLOAT64), *data, steps=20, check_every=10, parameterization=name)


JOBS: dict[str, Callable[[], Tensors]] = {
    "moments": moments,
    "closed-form": lambda: fit_small(mlp(), rows(9000), rows(301, 11), solver="closed-form"),
    "convolutions": lambda: fit_small(
        convolutions(), loader(), images(65, 4), likelihood="categorical", params="all", solver="closed-form", chunk_size=4
    ),
    "members": lambda: fit_small([mlp(), mlp()], rows(200), rows(3, 11), solver="closed-form", score="paper"),
    "refine": lambda: fit_small(mlp(), rows(701), rows(120, 11), solver="refine", steps=8, check_every=8),
    "refine64": lambda: fit_small(mlp(FLOAT64), rows(701, dtype=FLOAT64), rows(120, 11, FLOAT64), steps=60, check_every=20),
    **{law: partial(other_law, law) for law in ("low-rank", "subspace", "flow")},
    "sgd-shuffled": lambda: fit_small(
        convolutions(), loader(shuffle=True), images(65, 4), likelihood="categorical", params="last-layer", solver="sgd",
        steps=25, check_every=10,
    ),
    "sharded": lambda: fit_small(
        mlp(), own_half(rows(601)), own_half(rows(121, 11)), solver="closed-form", ranks="sharded", score="epistemic"
    ),
    "sampler": lambda: fit_small(mlp(), by_sampler(rows(600)), rows(121, 11), solver="closed-form"),
    "wrapped": lambda: fit_small(wrap_model(mlp()), *TWO, solver="closed-form"),
    "other-rows": other_rows,
    "one-fails": one_fails,
    "fsdp": lambda: sharded_model("fsdp"),
    "fully-shard": lambda: sharded_model("fully_shard"),
}  # fmt: skip


class EndsAfter:
    """A `output_fn` that ends the fit a few calls after its state tells of a part: without a last word, or by an error."""

    def __init__(self, file: Path, part: str, end: Callable[[], Any]) -> None:
        self.file, self.part, self.end, self.calls = file, part.encode(), end, 5
        self.seen = 0

    def __call__(self, output: Tensor) -> Tensor:
        self.seen += 1
        if self.file.exists() and self.part in self.file.read_bytes():
            self.calls -= 1
        if self.calls == 0:
            self.end()
        return output


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fit_in_steps(checkpoint: Path | None = None, end: EndsAfter | None = None, **options: Any) -> Tensors:
    """A fit with a basis, a closed form, and 40 steps over a DataLoader that shuffles, checked four times."""
    output_fn = end or EndsAfter(Path("nowhere"), "", kill)
    train = DataLoader(TensorDataset(*rows(301)), batch_size=32, shuffle=True)
    chosen: dict[str, Any] = {"steps": 40, "check_every": 10, "patience": None, "chunk_size": 4, "seed": 5} | options
    return fit_small(mlp(), train, rows(60, 11), output_fn=output_fn, checkpoint=checkpoint, **chosen)


def fit_and_die(file: Path) -> Tensors:
    """The last rank dies in the middle of the steps."""
    return fit_in_steps(file, EndsAfter(file, "steps.", kill) if RANK == SIZE - 1 else None)


def fit_and_hang(file: Path) -> Tensors:
    """The last rank hangs there."""
    stop = EndsAfter(file, "steps.", lambda: os.kill(os.getpid(), signal.SIGSTOP))
    return fit_in_steps(file, stop if RANK == SIZE - 1 else None)


if __name__ == "__main__":
    folder, file = Path(sys.argv[1]), Path(sys.argv[1]) / "fit.state"
    ended = {"killed": lambda: fit_and_die(file), "stopped": lambda: fit_and_hang(file), "resumed": lambda: fit_in_steps(file)}
    torch.set_num_threads(1)
    for job in sys.argv[2:]:
        try:
            save_file({n: t.contiguous() for n, t in (JOBS | ended)[job]().items()}, folder / f"{job}-{RANK}.safetensors")
        except (OffmapError, KeyError) as error:
            (folder / f"{job}-{RANK}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
