"""Classification and embedding models, judged by Transformers itself."""
