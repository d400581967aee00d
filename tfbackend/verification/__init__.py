"""What `tfbackend verify` knows: the ladder of evidence that a model is served right, from meta tensors to two ranks.

The oracle is Transformers itself, in a process that never imports vLLM; each engine runs in a process of its own.
"""
