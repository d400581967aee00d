"""Real engines on tiny random checkpoints, judged by Transformers itself."""
