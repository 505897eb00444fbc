"""Reporting of a run: metrics, files, plots, terminal output."""
