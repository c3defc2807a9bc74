"""The same seed gives the same bits in another process, and the same verdicts with another number of threads."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from checks.trust import ROOT, Check
from trained import classes, classifier, inputs, quick, regression, regressor
from zoo import ZOO

MODELS = ("mlp", "conv2d", "transformer", "lstm", "attention", "embedding")


def answers(seed: int) -> dict[str, Any]:
    """Hashes of the scores of three guards and their verdicts: with gradient steps, a classifier, and a model of the zoo."""
    case = ZOO[MODELS[seed % len(MODELS)]]
    steps = {"solver": "refine", "steps": 60, "check_every": 20}
    several = [regressor(seed), regressor(seed + 1)]
    guards = {
        "refine": (quick(several, regression(300, seed), regression(80, seed + 1), seed=seed, **steps), inputs(64, seed + 2)),
        "classifier": (quick(classifier(seed), classes(200, seed), classes(80, seed + 1), seed=seed), inputs(64, seed + 2)),
        "zoo": (quick(case.build(), case.data(40), case.data(30), output_fn=case.output_fn, seed=seed), case.inputs(8)),
    }
    answers = {
        name: guard(2 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x) for name, (guard, x) in guards.items()
    }
    bits = {name: hashlib.sha256(result.score.numpy().tobytes()).hexdigest() for name, result in answers.items()}
    return {"bits": bits, "verdicts": {name: result.ood.tolist() for name, result in answers.items()}}


def trial(seed: int, folder: Path) -> str:
    """Twice with one thread, then with as many as there are processors."""
    once, again, more = (_elsewhere(seed, threads) for threads in (1, 1, os.cpu_count() or 2))
    assert once == again, f"seed {seed}: another process, other bits"
    assert once["verdicts"] == more["verdicts"], f"seed {seed}: more threads, other verdicts"
    return "the same bits with more threads" if once == more else "the same verdicts with more threads"


def _elsewhere(seed: int, threads: int) -> dict[str, Any]:
    code = f"import json; from faults.same_bits import answers; print('answers' + json.dumps(answers({seed})))"
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "bench/src", ROOT / "tests", ROOT / "bench/tests"))),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.rpartition("answers")[2])


CHECK = Check(
    "On one thread the same seed gives the same bits in every process, and on all processors the same verdicts.",
    trial,
    30,
    600.0,
    0,
)
