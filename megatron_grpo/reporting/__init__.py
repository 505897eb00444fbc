"""What a run tells: metrics, files, pictures, the terminal."""
