"""A language model's head, blocks and tensor plan."""
