"""`python -m rackmount`: the program."""

from rackmount.cli.app import main

if __name__ == "__main__":
    main()
