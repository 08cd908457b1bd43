"""What the data determine."""
