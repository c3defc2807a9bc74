"""All tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial

from offmap_bench.tasks.citycam import SHIFTS, citycam
from offmap_bench.tasks.images import FEW, MEDIUM, SETTINGS, images, open_set, rename_task, thin_out
from offmap_bench.tasks.pretrained import WEIGHTS
from offmap_bench.tasks.shifts import SHIFT_TASKS
from offmap_bench.tasks.synthetic import digits, moons, regression
from offmap_bench.tasks.tabular import PREFIX, parse_name
from offmap_bench.tasks.task import Task, check_name
from offmap_bench.tasks.uci import MODES, SETS, uci

IMAGE_TASKS: dict[str, Callable[[int], Task]] = {
    **{f"images/{name}": partial(images, name) for name, setting in SETTINGS.items() if setting.near},
    **{f"images/{name}/open": partial(open_set, name) for name in SETTINGS},
    **{
        f"images/cifar10/resnet{depth}": partial(rename_task, partial(images, "cifar10"), f"images/cifar10/resnet{depth}")
        for depth in WEIGHTS.values()
    },
}
"""Tasks of images; some name the given net that belongs to them."""

TASKS: dict[str, Callable[[int], Task]] = {
    "regression": lambda seed: regression(),  # the authors' points, whatever the seed
    "moons": lambda seed: moons(),
    "digits": lambda seed: digits(seed=seed),
    **{f"uci/{name}/{mode}": partial(uci, name, mode) for mode in MODES for name in SETS},
    **IMAGE_TASKS,
    **{f"{name}/few": partial(thin_out, make_task, FEW, "few") for name, make_task in IMAGE_TASKS.items()},
    **{f"{name}/medium": partial(thin_out, make_task, MEDIUM, "medium") for name, make_task in IMAGE_TASKS.items()},
    **SHIFT_TASKS,
    **{f"citycam/{shift}": partial(citycam, shift) for shift in SHIFTS},
}


def task(name: str, seed: int = 0) -> Task:
    """The task of that name, or of a file of your own ("file:cars.csv#target=price"); `seed` splits its data."""
    if name.startswith(PREFIX):
        return parse_name(name).task(seed)
    return TASKS[check_name("the name of a task to be", name, TASKS)](seed)


def expand(patterns: Sequence[str]) -> list[str]:
    """Names and patterns such as "uci/*/extrapolation" to names, each once, in the order of the catalog for each pattern.

    Files of your own must be there, and their options right.

    >>> expand(["moons", "uci/y*"])
    ['moons', 'uci/yacht/extrapolation', 'uci/yacht/interpolation']
    """
    tasks: list[str] = []
    for pattern in patterns:
        if pattern.startswith(PREFIX):
            parse_name(pattern)
        matching = [pattern] if pattern.startswith(PREFIX) else [name for name in TASKS if fnmatchcase(name, pattern)]
        tasks += matching or [check_name("a task or a pattern of tasks to be", pattern, TASKS)]
    return list(dict.fromkeys(tasks))
