"""Every key of a config, typed and strictly checked."""
