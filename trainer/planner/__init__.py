"""What a run needs, known before it runs: memory, traffic and agreement, from the engines' own code on fake tensors."""
