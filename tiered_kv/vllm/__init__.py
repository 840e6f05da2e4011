"""The vLLM adapter: the only package that imports vLLM."""
