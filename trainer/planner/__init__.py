"""What a run needs, known before it runs: memory and traffic, from the engines' own code on fake tensors."""
