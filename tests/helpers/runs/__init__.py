"""Whole runs as a user starts them: commands, jobs, agents, environments, Slurm, a browser."""
