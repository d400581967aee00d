"""tfbackend serves any Hugging Face Transformers model in vLLM. Importing the package imports nothing else."""

__version__ = "0.1.0"
