"""The subjects to certify: the tiny copy and samples of each task, and the config's own base."""
