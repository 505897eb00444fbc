"""Pushes of weights and adapters into engines and workers, compared with the engines' loaders."""
