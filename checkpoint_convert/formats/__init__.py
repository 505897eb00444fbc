"""Weight file formats: safetensors, torch.save, torch_dist, GGUF; accessed box by box, in place."""
