"""Tiny random models in Hugging Face folders, quantised copies, and shapes of published models."""
