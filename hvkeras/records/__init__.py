"""The records that ranks write for reports, and the figures derived from them."""
