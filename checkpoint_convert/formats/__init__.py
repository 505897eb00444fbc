"""Files of weights: safetensors, torch, GGUF; read and written box by box, in place."""
