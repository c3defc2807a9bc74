"""`offmap` commands in processes of their own, forked from one that has imported torch already: a start costs little."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offmap

SOURCE = Path(offmap.__file__).parents[1]
PATHS = os.pathsep.join(map(str, (SOURCE, SOURCE.parent / "bench" / "src")))
ENVIRONMENT = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """What a command that failed said: one line, no traceback, nothing on standard output."""
        assert self.out == ""
        assert "Traceback" not in self.err
        assert self.err.startswith("offmap: ")
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("offmap: ").rstrip("\n")


class Shell:
    """Runs commands in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=folder
        )

    def __call__(
        self, *words: object, folder: Path | None = None, stop: tuple[str, int] | None = None, **environment: str
    ) -> Done:
        """`stop` is a file and a signal, sent as soon as the file is there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(
            json.dumps([list(map(str, words)), str(folder or self.folder), environment, stop]),
            file=self.process.stdin,
            flush=True,
        )
        return Done(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.communicate()


def serve() -> None:
    from offmap import cli
    from offmap.cli.doctor import self_test

    self_test()  # what torch imports when it is first needed, children need not import again
    for line in sys.stdin:
        words, folder, environment, stop = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if not child:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background are born deaf to it
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.environ.update(environment)
                os.chdir(folder)
                sys.argv = ["offmap", *words]
                os._exit(exit_code_of(cli))
            if stop:
                while not Path(stop[0]).exists():
                    time.sleep(0.01)
                os.kill(child, stop[1])
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
        print(json.dumps({"code": code, "out": texts[0], "err": texts[1]}), flush=True)


def exit_code_of(cli: Any) -> int:
    """The exit code of the command, as the interpreter gives it."""
    try:
        cli.main()
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    serve()
