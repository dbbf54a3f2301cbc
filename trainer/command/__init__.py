"""The commands `meshloom train`, `meshloom verify` and `meshloom checkpoint`; `launch/` has them as scripts."""
