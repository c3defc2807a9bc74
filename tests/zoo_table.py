"""Writes docs/results/models.md, what the library finds in every model of the zoo: `python tests/zoo_table.py`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from offmap.errors import ModelError
from offmap.model.forward import copy_model, forward
from offmap.model.params import stack_models
from offmap.posterior.basis import observe
from offmap.posterior.distribution import scaling
from zoo import ZOO, Case

PAGE = Path(__file__).parent.parent / "docs" / "results" / "models.md"

HEAD = """\
# Models

What the library finds in each model of the test zoo (`tests/zoo/`). `python tests/zoo_table.py` writes this page; a test compares
it with the code of today.

- A *matrix* is a parameter with at least two axes that are longer than one, or a rotated one.
- *Rotated* matrices have a basis of their inputs' directions, one per block (×2: two blocks).
- *Plain* matrices keep their own axes, for the reason given.
- Draws run all at once (`vmap`) where torch has a rule for every operator, else one after the other (loop).

| model | shows | matrices | rotated | plain, why | draws |
|---|---|---|---|---|---|
"""


def in_one_go(case: Case) -> bool:
    """Whether `vmap` runs the model, without a word about slowness."""
    drawn = scaling(case.build()).requires_grad_(False).draw(range(2))
    with torch.no_grad(), warnings.catch_warnings(action="error"):
        try:
            forward(copy_model(case.build()), drawn, case.inputs(2), output_fn=case.output_fn)
        except (ModelError, UserWarning):
            return False
    return True


def row(case: Case) -> str:
    """One line of the table, by asking the library."""
    held = stack_models(case.build())
    seen = observe(held, lambda rows: [case.inputs()], rotated=True, output_fn=case.output_fn)
    turned = seen.rotation()
    blocks = {name: len(turned.views[name].blocks) for name in held.mean if name in turned.matrices}
    matrices = [name for name, w in held.mean.items() if sum(n > 1 for n in w.shape[1:]) > 1 or name in blocks]
    rotated = join_notes({name: f" ×{count}" if count > 1 else "" for name, count in blocks.items()})
    plain = join_notes({name: f": {turned.why[name]}" for name in matrices if name not in blocks})
    cells = (case.name, case.shows, str(len(matrices)), rotated, plain, "vmap" if in_one_go(case) else "loop")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def join_notes(notes: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}`{note}" for name, note in notes.items())


def page() -> str:
    rows = [row(case) for case in ZOO.values()]
    batched = sum(line.endswith("| vmap |") for line in rows)
    return (
        HEAD + "\n".join(rows) + f"\n\n{len(rows)} models: {batched} run all draws at once, {len(rows) - batched} one by one.\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"Wrote {PAGE}")
