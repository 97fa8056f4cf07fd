"""`python -m rackmount`: the program."""

from rackmount.cli.app import main

main()
