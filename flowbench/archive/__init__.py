"""The store of runs: a folder of documents that never change, its index, and the git branch that others share it by."""
