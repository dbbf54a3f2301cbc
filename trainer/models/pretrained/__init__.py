"""A base's folder: its files, its quantisation, and its values under the names of the model."""
