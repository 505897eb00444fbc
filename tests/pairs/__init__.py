"""Tests of two features together, over the table of `features`."""
