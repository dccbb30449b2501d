"""`python -m stillfresh` is the command `stillfresh`."""

from stillfresh.cli import main

if __name__ == "__main__":
    main(prog_name="stillfresh")
