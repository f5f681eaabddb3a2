"""Lets `python -m flowbench` be the command line."""

from flowbench.cli import main

if __name__ == "__main__":
    main()
