"""How a run starts and ends: its processes, and that nothing is left behind."""
