"""Tables by the suffix of their file."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from offmap.data.tables.block import Table
from offmap.data.tables.csv import open_text
from offmap.data.tables.npz import open_archive
from offmap.data.tables.parquet import open_parquet
from offmap.errors import ConfigError, DataError

FORMATS: dict[str, Callable[[Path, str | None], AbstractContextManager[Table]]] = {
    ".csv": open_text,
    ".csv.gz": open_text,
    ".npz": open_archive,
    ".parquet": open_parquet,
}


@contextmanager
def opened(path: str | Path, separator: str | None = None) -> Generator[Table]:
    """A table to read; `separator` is that of a CSV file, by default found in its header."""
    path = Path(path)
    suffix = suffix_of(path)
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        raise DataError(f"Expected a table at {path}, but {what}.")
    with FORMATS[suffix](path, separator) as table:
        repeated = sorted({name for name in table.names if table.names.count(name) > 1})
        if repeated or "" in table.names or not table.names:
            raise DataError(
                f"Expected a table with names that differ in {path}, but got {repeated or 'an empty one'}. Is the header missing?"
            )
        yield table


def suffix_of(path: Path) -> str:
    """The suffix of a table that can be read."""
    suffix = next((end for end in FORMATS if path.name.lower().endswith(end)), None)
    if suffix is None:
        raise ConfigError(f"Expected a table to end in one of {sorted(FORMATS)}, but got {path.name!r}.")
    return suffix
