"""Quantised weights: their schemes, places in files and numbers; a model, and a rank's part."""
