"""An engine on top of `transformers`, which tests compare others with."""
