"""A guard file and its nets, which the user names: nothing is imported because a file says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import offmap
from offmap.cli.models import nets_of
from offmap.cli.options import Misuse
from offmap.data.tables.schema import Schema
from offmap.errors import FileError
from offmap.guard import Guard
from offmap.io.guard_file import about


def load_guard(path: Path, net: str | None, weights: Sequence[Path] | None, trust: bool) -> tuple[Guard, Schema]:
    """The guard, and the columns that it remembers.

    To import a module is to run its code, so a guard file, which anyone may have made, does not decide on it: `net` is asked for
    again, or `trust`. Files of weights are read as plain tensors and compared with the digests in the guard, so those that the
    file names, beside it, are used where none are given.
    """
    known = about(path)
    named = known.get("net") if isinstance(known.get("net"), str) else None
    if net is None and not (trust and named):
        again = f"--net {named}, with which it was fitted, or --trust-net to import that because the file says so"
        raise Misuse(f"{path} needs the net that it guards: pass {again if named else '--net MODULE:CALLABLE'}.")
    files = list(weights or [])
    if not files:
        remembered = known.get("weights")
        files = [path.absolute().parent / str(name) for name in remembered] if isinstance(remembered, list) else []
        lost = [file for file in files if not file.is_file()]
        if lost:
            raise FileError(f"Expected the weights of fit time at {lost[0]}, but there is no such file. Pass --weights.")
    nets = nets_of(net or str(named), files)
    return offmap.load(path, nets if len(nets) > 1 else nets[0]), Schema.from_dict(known, path)
