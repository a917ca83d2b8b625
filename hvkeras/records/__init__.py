"""The records that ranks leave behind for reports, and what they say."""
