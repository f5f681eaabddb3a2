"""flowbench measures deep-learning frameworks against each other and reports what it measured."""

__version__ = "0.1.0"
