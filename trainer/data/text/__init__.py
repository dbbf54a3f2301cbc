"""Documents as tokens: read, rendered, tokenised, packed, and kept on disk."""
