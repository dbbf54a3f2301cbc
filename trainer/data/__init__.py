"""Documents, tokens, samples, and the order in which they are trained on."""
