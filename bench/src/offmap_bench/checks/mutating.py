"""Small changes to the code, made by cosmic-ray: which there are, and in which order they are drawn.

Changes inside annotations are left out, as nothing reads those at run time, and so are stars between arguments.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from offmap_bench.checks.covered import SOURCE

SUBJECTS = ("core/*.py", "solve/*.py", "metrics/*.py", "scores.py", "conformal.py")
"""Below `src/offmap`."""

Place = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th change that an operator of cosmic-ray can make to a file."""

    file: str  # below src/offmap
    operator: str
    occurrence: int
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"


def subjects() -> list[str]:
    """The files whose mutants are drawn, below `src/offmap`."""
    paths = (path for pattern in SUBJECTS for path in SOURCE.glob(pattern))
    return sorted(path.relative_to(SOURCE).as_posix() for path in paths)


def mutants(file: str) -> dict[Place, list[Mutant]]:
    """All mutants of a file, by the place that they change."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    text = read(file)
    nodes, spared = list(ast_nodes(get_ast(text))), annotated(text)
    found: dict[Place, list[Mutant]] = {}
    for name in operator_names():
        if (kind := get_operator(name)).arguments():
            continue  # those need to be told what to change
        places = (place for node in nodes for place in kind().mutation_positions(node))
        for i, place in enumerate(places):
            if not inside(place, spared):
                found.setdefault(place, []).append(Mutant(file, name, i, place[0][0]))
    return found


def mutated(mutant: Mutant) -> str:
    """The text of the mutant's file with its change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    text = mutate_code(read(mutant.file), get_operator(mutant.operator)(), mutant.occurrence)
    if text is None:
        raise ValueError(f"{mutant} is no longer there; draw mutants anew")
    return text


def annotated(text: str) -> list[Place]:
    """Where a file's annotations and docstrings stand."""
    nodes: list[ast.expr] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.arg(annotation=ast.expr() as kind) | ast.AnnAssign(annotation=kind):
                nodes.append(kind)
            case ast.FunctionDef(returns=ast.expr() as kind):
                nodes.append(kind)
            case _:
                pass
    return [((n.lineno, n.col_offset), (n.end_lineno or n.lineno, n.end_col_offset or 0)) for n in nodes]


def inside(place: Place, spans: Sequence[Place]) -> bool:
    """Whether a place lies within one of the spans."""
    return any(start <= place[0] and place[1] <= stop for start, stop in spans)


@cache
def read(file: str) -> str:
    return (SOURCE / file).read_text(encoding="utf-8")


def digest(file: str) -> str:
    return hashlib.sha256(read(file).encode()).hexdigest()[:16]


def drawn(seed: int) -> Iterator[Mutant]:
    """One mutant of each place, the places in an order by seed: each beginning of it is a fair sample of the code."""
    chance = random.Random(seed)
    places = [choices for file in subjects() for choices in mutants(file).values()]
    for choices in chance.sample(places, len(places)):
        chance.shuffle(choices)
        if (mutant := next(filter(changes, choices), None)) is not None:
            yield mutant


def changes(mutant: Mutant) -> bool:
    """Whether the change is one of code: the star before keyword arguments is no product."""
    try:
        return stars(mutated(mutant)) == stars(read(mutant.file))
    except SyntaxError:
        return False


def stars(text: str) -> list[int]:
    """How many arguments of each function are positional only."""
    return [len(node.posonlyargs) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.arguments)]


def difference(before: str, after: str, line: int) -> tuple[str, str]:
    """The line of a change in both texts; of the second, empty where it is gone."""
    lines = before.splitlines(), after.splitlines()
    gone = len(lines[1]) < len(lines[0])
    return lines[0][line - 1].strip(), "" if gone else lines[1][line - 1].strip()
