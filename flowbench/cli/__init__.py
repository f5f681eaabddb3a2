"""The command line: parses, calls, prints. Nothing heavy is imported before it is known what is asked for."""

from flowbench.cli.entry_point import cli, main

__all__ = ["cli", "main"]
