"""The push of new weights to the engines."""
