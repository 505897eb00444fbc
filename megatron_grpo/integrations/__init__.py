"""Adapters to environment libraries: commands that import the library and no torch."""
