"""One encoder, five tasks: LoRA adapters, a router that chooses among them, and training of both together."""
