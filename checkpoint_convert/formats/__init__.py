"""Weight file formats: safetensors, torch.save, torch_dist; accessed box by box, in place."""
