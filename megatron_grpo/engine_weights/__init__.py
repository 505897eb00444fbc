"""Weights in engines: what each worker holds, how a push fills it, and how that is verified."""
