"""Images: where they are from, how they are read, and how they are augmented."""
