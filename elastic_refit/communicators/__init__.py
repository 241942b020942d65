"""Communicators: move bytes inside one membership, and can be broken from outside."""
