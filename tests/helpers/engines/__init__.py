"""Real vLLM and SGLang engines and workers, and scripted answers behind a real client."""
