"""Every architecture of Transformers' causal-LM mapping, served on a tiny checkpoint and judged by Transformers."""
