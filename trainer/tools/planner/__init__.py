"""Memory and traffic of a run before it runs: the engines' own code on fake tensors."""
