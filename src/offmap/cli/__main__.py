"""`python -m offmap.cli`."""

from offmap.cli import main

main()
