"""Image classifiers: the default guard beside the classic detectors, on the same nets and images.

`python -m benchmarks.images run resnet20 resnet32 resnet56 lenet "lenet x5"` measures into `benchmarks/records/images.json`, each
net on its own. With `--full` all images are used instead of some thousands, with `--half` half of those; `--guard` measures the
guard anew and keeps what is known of the detectors. `mixture` joins the guards of the three ResNets, `table` writes
`docs/images.md`. Times are those of one thread: other work on the machine does not count.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offmap
from offmap.data.images import images, setting_of
from offmap.data.task import Task
from offmap.data.weights import weights
from offmap.detectors.catalog import DETECTORS
from offmap.files import cache_folder, write_whole
from offmap.metrics import auroc
from offmap.nets.lenet import lenet
from offmap.nets.resnet import cifar_resnet

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "images.json"
PAGE = ROOT / "docs" / "images.md"
RESNETS = {"resnet20": 20, "resnet32": 32, "resnet56": 56}
GUARD = "offmap.fit, the default"
TRAIN, TEST, STRANGE = 5_000, 2_000, 1_000
ROWS = {"cifar10": 5_000, "mnist": 12_000}
TIMED = 500
MEMBERS, EPOCHS = 5, 10
SLOW = ("gram",)
"""Left out with `--half`."""

Result = TypeVar("Result")


def main() -> None:
    """Measure what is asked for, then write the page."""
    torch.set_num_threads(1)
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for name in words[1:] if words[:1] == ["run"] else []:
        task = few("mnist" if name.startswith("lenet") else "cifar10")
        kept[name] = measured(name, task, kept.get(name, {}) if "--guard" in sys.argv else None)
        keep(kept)
    if words[:1] == ["mixture"]:
        kept["mixture"] = mixture()
        keep(kept)
    PAGE.write_text(page(kept), encoding="utf-8")
    print(f"The page is {PAGE}")


def keep(kept: Mapping[str, Any]) -> None:
    """Write all that was measured."""
    write_whole(RECORD, (json.dumps(kept, indent=1) + "\n").encode())


def few(name: str) -> Task:
    """The task, or some thousands of its images, the first ones: classes are mixed in the files."""
    if "--full" in sys.argv:
        return images(name)
    task, part = images(name, rows=ROWS[name]), 2 if "--half" in sys.argv else 1
    sizes = (task.train, TRAIN), (task.valid, TEST), (task.test, TEST)
    train, valid, test = ((x[: most // part], y[: most // part]) for (x, y), most in sizes)
    ood = {label: strange[: STRANGE // part] for label, strange in task.ood.items()}
    return Task(task.name, train, valid, test, ood, task.likelihood, task.outputs)


def nets_of(name: str, task: Task) -> list[nn.Module]:
    """The given ResNet, or LeNets trained here."""
    if name in RESNETS:
        net = cifar_resnet(RESNETS[name]).eval()
        net.load_state_dict(weights(f"cifar10_{name}"))
        return [net]
    x, y = task.train
    return [trained(lenet(seed=seed), x, y, seed) for seed in range(MEMBERS if name == "lenet x5" else 1)]


def trained(net: nn.Module, x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Adam at 1e-3 in batches of 128, some epochs."""
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    order = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x), generator=order).split(128):
            loss = F.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What work gives, and its seconds on this thread."""
    start = time.thread_time()
    result = work()
    return result, time.thread_time() - start


def measured(name: str, task: Task, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """AUROC of the guard and of all detectors of the net, or those `known`, on every strange set, accuracies and times."""
    nets = nets_of(name, task)
    x, y = task.test
    guard, fitting = timed(lambda: offmap.fit(nets, task.train, task.valid, progress=False))
    print(f"{name}: fitted in {fitting:.0f} s", flush=True)
    with torch.no_grad():
        _, passing = timed(lambda: [net(x[:TIMED]) for net in nets])
    _, scoring = timed(lambda: guard.score(x[:TIMED]))
    scores = {part: guard.score(rows) for part, rows in {"test": x, **task.ood}.items()}
    torch.save(scores, scores_at(name))
    found = (known or {}).get("auroc", {}) | {GUARD: against(scores)}
    print(found[GUARD], flush=True)
    if len(nets) == 1 and known is None:
        kinds = [kind for kind in DETECTORS if kind not in (SLOW if "--half" in sys.argv else ())]
        detectors = offmap.detect_all(nets[0], task.train, task.valid, methods=kinds)
        for label, detector in detectors.items():
            found[label] = against({part: detector.score(rows) for part, rows in {"test": x, **task.ood}.items()})
            print(label, found[label], flush=True)
    labels = {"host": guard.predict(x, clip=0.0).label, "guard": guard.predict(x).label}
    return {
        "auroc": found,
        "near": list(setting_of(task.name.split("/")[1]).near),
        "images": counts(task),
        "accuracy": {whose: float((label == y).double().mean()) for whose, label in labels.items()},
        "seconds": {"fit": fitting, "plain pass": passing * 1000 / TIMED, "score": scoring * 1000 / TIMED},
        "draws": guard.draws,
    }  # fmt: skip


def counts(task: Task) -> dict[str, int]:
    """How many images there are of every part."""
    parts = {"train": task.train[1], "valid": task.valid[1], "test": task.test[1], **task.ood}
    return {part: len(rows) for part, rows in parts.items()}


def scores_at(name: str) -> Path:
    """Where the guard's scores of a net are kept between runs: the mixture needs those of all three."""
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.pt"


def against(scores: Mapping[str, Tensor]) -> dict[str, float]:
    """AUROC of the test images against every strange set."""
    return {part: round(float(auroc(scores["test"], s)), 5) for part, s in scores.items() if part != "test"}


def mixture() -> dict[str, Any]:
    """The mean score of the three guards, in standard deviations over validation images, on images that all of them scored."""
    each = [torch.load(scores_at(name), weights_only=True) for name in RESNETS]
    sizes = {part: min(len(scores[part]) for scores in each) for part in each[0]}
    cut = [{part: scores[part][:size] for part, size in sizes.items()} for scores in each]
    together = {part: torch.stack([scores[part] for scores in cut]).mean(0) for part in sizes}
    rows = {GUARD: together, **{f"{name} alone": scores for name, scores in zip(RESNETS, cut, strict=True)}}
    return {"auroc": {label: against(scores) for label, scores in rows.items()}, "near": list(setting_of("cifar10").near)}


INTRODUCTION = """# Image classifiers

Made by `python -m benchmarks.images` from `benchmarks/records/images.json`: AUROC, in per cent, of strange images against test
images, for the guard that `offmap.fit(net, train, valid)` makes without any setting, and for the classic detectors of
`offmap.detect_all` on the same net and images. The ResNets are given ones that have seen all training images; validation images
are the first 2,000 test images, results are on others. How the score was chosen, without these strange images, is told in
[the choice](choice-images.md). Seconds are those of one thread. Of ResNet-32 and -56 half as many images were taken, and Gram
matrices, the slowest detector, left out; the run of ResNet-56 was cut short: its detectors of features and its times are missing.
The accuracy of ResNet-20 is of 500 images and ten draws. The mixture is the mean score of the three ResNets' guards, beside each
alone on the same images. LeNets are trained here on the training images that are named. Trained competitors, open sets and ranks
are on [another page](openood.md), made by `offmap bench run openood` with all images. Absent are strange sets that were not at
hand (CIFAR-100, SVHN, Places365); [the loader](data.md) takes them from a folder of yours.
"""


def page(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """A section for every net."""
    return "\n".join([INTRODUCTION, *(section(name, kept[name]) for name in kept)])


def verdict(found: Mapping[str, Mapping[str, float]]) -> str:
    """How far the guard is from the best other row, from entropy, and where another is better."""
    ours = found[GUARD]
    means = {label: 100 * fmean(of.values()) for label, of in found.items()}
    others = [label for label in found if label != GUARD]
    best = max(others, key=lambda label: means[label])
    said = [f"Mean {means[GUARD] - means[best]:+.1f} against the best other row ({best})"]
    if "entropy" in found:
        said.append(f"{means[GUARD] - means['entropy']:+.1f} against entropy")
    ahead = {s: max(others, key=lambda label: found[label][s]) for s in ours}
    behind = [
        f"{s} ({label}, {100 * (found[label][s] - ours[s]):+.1f})" for s, label in ahead.items() if found[label][s] > ours[s]
    ]
    return f"{'; '.join(said)}. Another is better on {', '.join(behind) if behind else 'none of the sets'}.\n"


def section(name: str, of: Mapping[str, Any]) -> str:
    """Every method by its mean, and what the guard costs."""
    sets = list(next(iter(of["auroc"].values())))
    near = [s for s in sets if s in of["near"]]
    far = [s for s in sets if s not in of["near"]]
    lines = [["", *sets, "near", "far", "mean"], ["---", *["---:"] * (len(sets) + 3)]]
    for label, found in sorted(of["auroc"].items(), key=lambda item: -fmean(item[1].values())):
        values = [*(found[s] for s in sets), *(fmean(found[s] for s in part) for part in (near, far, sets))]
        shown = [f"{100 * v:.1f}" for v in values]
        lines.append([f"**{label}**" if label == GUARD else label, *shown])
    told = [f"## {name}", "", *("| " + " | ".join(line) + " |" for line in lines), ""]
    if len(of["auroc"]) > 1:
        told.append(verdict(of["auroc"]))
    if "seconds" in of:
        s, a = of["seconds"], of["accuracy"]
        told.append(
            f"Accuracy {100 * a['host']:.1f} of the host, {100 * a['guard']:.1f} of the guard. Fit "
            f"{s['fit']:.0f} s; 1,000 images: a plain pass {s['plain pass']:.2f} s, scores {s['score']:.2f} s with {of['draws']} "
            f"draws ({s['score'] / s['plain pass']:.1f} passes). Images: "
            + ", ".join(f"{part} {count:,}" for part, count in of["images"].items()) + ".\n"
        )  # fmt: skip
    return "\n".join(told)


if __name__ == "__main__":
    main()
