"""One builder for each LayerSpec: frozen data becomes a layer of vLLM. No decision is taken here."""
