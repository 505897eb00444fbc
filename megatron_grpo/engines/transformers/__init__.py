"""A minimal rollout engine on top of `transformers`, for machines without vLLM and for tests."""
