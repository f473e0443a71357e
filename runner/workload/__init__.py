"""How work is divided: batches into shares and micro-batches, layers into pipeline stages, by measured speed."""
