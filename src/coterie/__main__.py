"""`python -m coterie`: the same as the `coterie` command."""

from coterie.cli.main import main

main()
