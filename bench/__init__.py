"""Speed, measured against vLLM's own backend and its hand-written models, all in one run."""
