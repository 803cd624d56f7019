"""The same work for M5, vLLM and nano-vllm on one GPU. Figures: docs/measurements/peers_h200.md."""
