"""`python -m offmap` is the `offmap` command."""

from offmap.cli import main

main()
