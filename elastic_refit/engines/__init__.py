"""Engines: what generates, and how weights get into it."""
