"""Commands beside training: nothing of a run knows them."""
