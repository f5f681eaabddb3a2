"""Judges measured figures: pure functions of run documents, with no clock, no file and no GPU."""
