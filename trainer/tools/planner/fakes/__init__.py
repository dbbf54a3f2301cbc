"""One process as all ranks of a cluster: fake tensors and messages, and what they would take."""
