"""Agents: programs that ask an OpenAI-compatible endpoint for the model's turns."""
