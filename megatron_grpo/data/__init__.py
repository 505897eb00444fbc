"""Prompts: from files or the Hugging Face hub to tokens."""
