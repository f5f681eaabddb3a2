"""The work every engine is given alike: models as tables of parameters, weights and batches from a seed, loss checks."""
