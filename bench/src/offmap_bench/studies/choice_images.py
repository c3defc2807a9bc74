"""How the default score of image classifiers joins its parts, and guards of different nets: on in-distribution images and their changes.

`python -m offmap_bench.studies.choice_images [NAME ...]` measures what is missing in `bench/records/choice_images.json`, or the named
ones anew, and writes its tables into `docs/choice-images.md`; `... table` only writes. OOD images of the offmap_bench.speed have no
part in it: there are fourteen changes of validation images and, for nets that are trained here on six of ten classes, training
images of the other four. Their classes are drawn by a seed that no plan uses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offmap
from offmap.guard import Guard
from offmap.io.atomic import write_whole
from offmap.metrics import auroc
from offmap.scores.neighbours import Scale
from offmap_bench.paths import DOCS, RECORDS
from offmap_bench.runner.trained_classifiers import GIVEN, given_net, learned
from offmap_bench.tasks.images import images, open_set
from offmap_bench.tasks.task import Task

RECORD = RECORDS / "choice_images.json"
PAGE = DOCS / "choice-images.md"
SEED = 7
"""Of six known classes; plans have 0 to 4."""

FAMILIAR, UNKNOWN = 1_000, 2_000

Parts = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------------------- changes


def blurred(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 5, 1, 2, count_include_pad=False)


def coarse(x: Tensor) -> Tensor:
    return F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0)


def zoomed(x: Tensor) -> Tensor:
    side, cut = x.shape[-1], x.shape[-1] // 4
    return F.interpolate(x[..., cut:-cut, cut:-cut], size=(side, side), mode="bilinear", antialias=True)


def halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([x[..., :half], x.roll(1, 0)[..., half:]], -1)


def shuffled(x: Tensor) -> Tensor:
    """Sixteen patches of each image in another order."""
    order = torch.from_numpy(np.random.RandomState(0).permutation(16))
    size = x.shape[-1] // 4
    patches = F.unfold(x, size, stride=size)[:, :, order]
    return F.fold(patches, (4 * size, 4 * size), size, stride=size)


def tiled(x: Tensor) -> Tensor:
    small = F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True)
    return small.repeat(1, 1, 2, 2)


def noisy(x: Tensor) -> Tensor:
    noise = torch.from_numpy(np.random.RandomState(1).standard_normal(x.shape)).to(x)
    return (x + 0.1 * noise).clamp(0, 1)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "blurred": blurred,
    "channels exchanged": lambda x: x.roll(1, 1),
    "low contrast": lambda x: 0.5 + 0.3 * (x - 0.5),
    "halves of two": halves,
    "upside down": lambda x: x.flip(2),
    "grey": lambda x: x.mean(1, keepdim=True).expand_as(x).contiguous(),
    "inverted": lambda x: 1 - x,
    "half the resolution": coarse,
    "mean of two": lambda x: (x + x.roll(1, 0)) / 2,
    "noise": noisy,
    "turned": lambda x: x.rot90(1, (2, 3)),
    "patches shuffled": shuffled,
    "tiled": tiled,
    "zoomed": zoomed,
}
COLOURED = ("channels exchanged", "grey")
"""Changes that leave an image of one channel as it is."""


# ------------------------------------------------------------------------------------------------------------- measuring


def sets_of(task: Task, strange: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Validation images that scales come from, others as in-distribution ones, their changes, and what else is OOD."""
    x = task.valid[0]
    judged = x[FAMILIAR : 2 * FAMILIAR]
    changes = {name: change(judged) for name, change in CHANGES.items() if x.shape[1] > 1 or name not in COLOURED}
    return {"scales": x[:FAMILIAR], "in-distribution": judged, **changes, **strange}


def parts_of(nets: nn.Module | list[nn.Module], task: Task, sets: Mapping[str, Tensor]) -> dict[str, Parts]:
    """What the default guard joins, {set: {part: (B,)}}."""
    guard: Guard = offmap.fit(nets, task.train, tuple(t[:FAMILIAR] for t in task.valid), progress=False)  # pyright: ignore[reportArgumentType]
    return {name: guard.terms(x) for name, x in sets.items()}


def mean_of(several: Sequence[dict[str, Parts]]) -> dict[str, Parts]:
    """Each part as the mean over nets, in standard deviations over validation images."""
    names = several[0]["scales"]
    means = {s: {n: torch.stack([each[s][n] for each in several]).mean(0) for n in names} for s in several[0]}
    scales = {n: Scale.of(values) for n, values in means["scales"].items()}
    return {s: {n: scales[n](values) for n, values in parts.items()} for s, parts in means.items()}


def soft(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(parts.values())).logsumexp(0)


JOINS: dict[str, Callable[[Parts], Tensor]] = {
    "soft maximum (the default)": soft,
    "mean": lambda parts: torch.stack(list(parts.values())).mean(0),
    "maximum": lambda parts: torch.stack(list(parts.values())).amax(0),
    "soft maximum without disagreement": lambda parts: soft({n: v for n, v in parts.items() if n != "disagreement"}),
    "soft maximum without logits": lambda parts: soft({n: v for n, v in parts.items() if n != "logits"}),
    "soft maximum without last layer": lambda parts: soft({n: v for n, v in parts.items() if n != "last layer"}),
    "soft maximum without layers": lambda parts: soft({n: v for n, v in parts.items() if n != "layers"}),
}


def judged(parts: Mapping[str, Parts]) -> dict[str, dict[str, float]]:
    """AUROC of every part and join, {row: {set: value}}."""
    rows = {name: {s: of[name] for s, of in parts.items()} for name in parts["in-distribution"]}
    rows |= {name: {s: join(of) for s, of in parts.items()} for name, join in JOINS.items()}
    return {name: against(scores) for name, scores in rows.items()}


def against(scores: Mapping[str, Tensor]) -> dict[str, float]:
    """AUROC of the in-distribution images against every OOD set."""
    strange = {s: values for s, values in scores.items() if s not in ("scales", "in-distribution")}
    return {s: round(float(auroc(scores["in-distribution"], values)), 5) for s, values in strange.items()}


def six(name: str, members: int = 1) -> tuple[list[nn.Module], Task, dict[str, Tensor]]:
    """Nets trained on six classes, their task, and training images of the other classes."""
    task, whole = open_set(name, SEED), images(name, SEED, strange=False)
    known = np.random.RandomState(SEED).permutation(10)[:6]
    others = ~torch.isin(whole.train[1], torch.from_numpy(known))
    nets = [learned(task, "plain", {}, SEED, member)[0].net for member in range(members)]
    return nets, task, {"unknown classes": whole.train[0][others][:UNKNOWN]}


def run_six(name: str) -> dict[str, Any]:
    """Rows of one net that knows six classes."""
    nets, task, strange = six(name)
    return judged(parts_of(nets, task, sets_of(task, strange)))


def run_five(name: str) -> dict[str, Any]:
    """Rows of five nets that know six classes, in one guard and in one for each."""
    nets, task, strange = six(name, 5)
    sets = sets_of(task, strange)
    each = [parts_of(net, task, sets) for net in nets]
    return judged(parts_of(nets, task, sets)) | {MEAN: against(mean_score(each))}


def mean_score(several: Sequence[Mapping[str, Parts]]) -> dict[str, Tensor]:
    """The mean of the scores of several guards, in standard deviations over validation images."""
    scores = [{s: soft(parts) for s, parts in of.items()} for of in several]
    known = [of["scales"] for of in scores]
    scaled = [{s: (x - own.mean()) / own.std() for s, x in of.items()} for of, own in zip(scores, known, strict=True)]
    return {s: torch.stack([of[s] for of in scaled]).mean(0) for s in scores[0]}


MEAN = "mean of the scores of single guards"


def run_resnets() -> dict[str, dict[str, Any]]:
    """Rows of the three given nets, and of two ways to join them."""
    task = images("cifar10", strange=False)
    sets, several = sets_of(task, {}), dict[str, dict[str, Parts]]()
    for name in GIVEN:
        print(name, flush=True)
        several[name] = parts_of(given_net(name, 10), task, sets)
    found: dict[str, dict[str, Any]] = {name: judged(parts) for name, parts in several.items()}
    each = list(several.values())
    found["three resnets"] = judged(mean_of(each)) | {MEAN: against(mean_score(each))}
    return found


# ------------------------------------------------------------------------------------------------------------- the page


NEAR = ("upside down", "turned", "halves of two", "mean of two")
"""Changes that keep the texture."""


def tables(kept: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """One table for the given nets, one for those that know six classes."""
    open_sets = {net for net, rows in kept.items() if "unknown classes" in next(iter(rows.values()))}
    halves = [{net: rows for net, rows in kept.items() if (net in open_sets) is known} for known in (False, True)]
    titles = ("Given nets, which know all ten classes of CIFAR-10:", "Nets that know six of ten classes:")
    return "\n".join(f"{title}\n\n{table(half)}" for title, half in zip(titles, halves, strict=True) if half)


def table(kept: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """A row for every part and join; of every net the mean over changes, over near ones, and unknown classes."""
    columns: list[tuple[str, str, Callable[[Mapping[str, float]], float]]] = []
    for net, rows in kept.items():
        columns.append((net, "changes", lambda of: fmean(v for s, v in of.items() if s != "unknown classes")))
        columns.append((net, "near", lambda of: fmean(of[s] for s in NEAR)))
        if "unknown classes" in next(iter(rows.values())):
            columns.append((net, "unknown", lambda of: of["unknown classes"]))
    names = list(dict.fromkeys(name for rows in kept.values() for name in rows))
    lines = [["", *(f"{net}, {what}" for net, what, _ in columns)], ["---", *["---:"] * len(columns)]]
    for name in names:
        cells = [f"{100 * of(kept[net][name]):.1f}" if name in kept[net] else "–" for net, _, of in columns]
        lines.append([name, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


BEGIN, END = "<!-- choice_images -->\n", "<!-- /choice_images -->"


def main() -> None:
    """Measure what is missing, then write the tables."""
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    asked = sys.argv[1:]
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "six digits": lambda: {"six digits": run_six("mnist")},
        "five nets, six digits": lambda: {"five nets, six digits": run_five("mnist")},
        "six of cifar10": lambda: {"six of cifar10": run_six("cifar10")},
        "three resnets": run_resnets,
    }
    for name, run in runs.items() if asked != ["table"] else ():
        if name in asked or (not asked and name not in kept):
            kept |= run()
            write_whole(RECORD, (json.dumps(kept, indent=1) + "\n").encode())
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables(kept) + END + rest.partition(END)[2], encoding="utf-8")
    print(f"The page is {PAGE}")


if __name__ == "__main__":
    main()
