"""Weights in engines: the workers' shards, their transfer by pushes, and its verification."""
