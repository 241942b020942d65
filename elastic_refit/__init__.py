"""elastic-refit: reinforcement-learning post-training that survives the loss of generation shards during a refit."""
