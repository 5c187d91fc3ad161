"""`python -m frazil`: the `frazil` command."""

from frazil.cli.commands import main

if __name__ == "__main__":
    main()
